"""The batch script on a real Slurm: a sweep in one job, in successive jobs, and in parts."""

import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import SMALL, TESTS, Finished, alive_in, wait_for
from dcpbench.records.store import read_rows
from plugins.hosts.namespaces import not_here
from plugins.hosts.slurm import Slurm, slurm
from support.drivers import environment

pytestmark = pytest.mark.slurm

SCRIPT = TESTS.parent / "scripts/ray.sbatch"
ASKED = ("-m", *SMALL, "device=cpu", "world_size=2", "saves=1", "parallel=fsdp2")
DIES = ("scenario=dies", *(f"scenario.options.{one}" for one in ("rank=1", "phase=train", "how=not,sleeps")))

_ALREADY_DONE = 229


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    if missing := [name for name in ("slurmctld", "slurmd", "munged") if not shutil.which(name)]:
        not_here(f"{', '.join(missing)} is not installed: make test-slurm")
    if os.geteuid() != 0:
        not_here("the daemons of Slurm need root: run make test-slurm as root")
    with slurm(tmp_path_factory.mktemp("slurm")) as made:
        yield made


def submit(cluster: Slurm, here: Path, *words: str, **more: str) -> str:
    """Submit the script with these options and overrides, and return the number of its job. The sweep is
    written to `sweep` in this folder, its output to `job.log`, or `job-<number>.log` for an array."""
    surroundings = environment() | {"SWEEP": str(here / "sweep"), "VENV": sys.prefix} | more
    options = [word for word in words if word.startswith("--")]
    log = here / ("job-%a.log" if any(word.startswith("--array") for word in options) else "job.log")
    asked = ("--config-dir", str(TESTS / "conf"), *(word for word in words if word not in options))
    job = ("--parsable", "--chdir", str(here), f"--output={log}", *options, str(SCRIPT), *asked)
    return cluster.run("sbatch", *job, **surroundings)


def test_requeued_job_resumes_and_cancelled_keeps_rows(cluster: Slurm, tmp_path: Path) -> None:
    folder, log = tmp_path / "sweep", tmp_path / "job.log"
    done = Finished(0, "", "", folder)

    def sleeps(resumed: str) -> bool:
        """Return whether the second cell runs, according to the output of the sweep."""
        output = log.read_text() if log.exists() else ""
        at_work = len([*folder.glob("*/rank1.log")]) == 2 and len(alive_in(folder)) >= 3
        return resumed in output and at_work and len(done.rows) == 1

    job = submit(cluster, tmp_path, "--nodes=2", *ASKED, *DIES)
    wait_for(lambda: sleeps(""))
    cluster.run("scontrol", "requeue", job)
    wait_for(lambda: cluster.state(job) == "PENDING" and alive_in(folder) == [])
    (row,) = done.rows
    assert row["status"] == "pass", log.read_text()
    assert [host["ranks"] for host in row["details"]["hosts"]] == [[0], [1]]

    cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now")
    wait_for(lambda: sleeps("resume: 1 of 2 cells are done"))
    cluster.run("scancel", "--signal=TERM", job)
    wait_for(lambda: cluster.state(job) not in ("RUNNING", "COMPLETING") and alive_in(folder) == [])
    assert done.rows == [row], log.read_text()
    assert "interrupted: 1 of 2 cells done, 1 left" in log.read_text()


def test_array_jobs_resume_until_the_sweep_is_complete(cluster: Slurm, tmp_path: Path) -> None:
    done = Finished(0, "", "", tmp_path / "sweep")
    seeds = f"seed={','.join(map(str, range(12)))}"
    job = submit(cluster, tmp_path, "--nodes=2", "--array=1-3%1", *ASKED, seeds)
    wait_for(lambda: len(done.rows) > 0)
    # As Slurm does before the time is up; `scancel` goes on until the job is gone, and then says so.
    cluster.run("sh", "-c", f"scancel --signal=INT {job}_1 || test $? = {_ALREADY_DONE}")
    wait_for(lambda: cluster.state(f"{job}_3") == "COMPLETED", 300)
    first, second, third = ((tmp_path / f"job-{number}.log").read_text() for number in (1, 2, 3))
    (before,) = re.findall(r"interrupted: (\d+) of 12 cells done", first)
    assert f"resume: {before} of 12 cells are done" in second
    assert "resume: 12 of 12 cells are done" in third
    assert [cluster.state(f"{job}_{number}") for number in (1, 2)] == ["FAILED", "COMPLETED"]
    assert [row["status"] for row in done.rows] == ["pass"] * 12
    assert len({row["cell"] for row in done.rows}) == 12
    assert not (done.folder / "superseded.jsonl").exists()  # nothing was run twice


def test_array_jobs_run_parts_two_at_a_time(cluster: Slurm, tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    job = submit(cluster, tmp_path, "--array=1-3%2", *ASKED, "seed=0,1,2,3,4,5", PARTS="3")
    wait_for(lambda: all(cluster.state(f"{job}_{part}") == "COMPLETED" for part in (1, 2, 3)), 300)
    rows = [row for part in (1, 2, 3) for row in read_rows(folder / f"{part}-of-3")[0]]
    assert [row["status"] for row in rows] == ["pass"] * 6
    assert {row["seed"] for row in rows} == {*range(6)}
    on = Counter(host["name"] for row in rows for host in row["details"]["hosts"])
    assert sorted(on.values()) == [2, 4], "one part on one node, two on the other"
