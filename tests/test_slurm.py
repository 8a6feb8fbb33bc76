"""The batch script of a sweep in one job, on a real Slurm: run, preempted and requeued, cancelled."""

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import SMALL, TESTS, Finished, alive_in, wait_for
from support.drivers import environment
from support.slurm import Slurm, slurm

pytestmark = pytest.mark.slurm

SCRIPT = TESTS.parent / "scripts/ray.sbatch"
ASKED = ("-m", *SMALL, "device=cpu", "world_size=2", "saves=1", "parallel=fsdp2", "scenario=dies")
WAYS = ("scenario.options.rank=1", "scenario.options.phase=train", "scenario.options.how=not,sleeps")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    if missing := [name for name in ("slurmctld", "slurmd", "munged") if not shutil.which(name)]:
        pytest.skip(f"{', '.join(missing)} is not installed: make test-slurm")
    if os.geteuid() != 0:
        pytest.skip("the daemons of Slurm need root: run make test-slurm as root")
    with slurm(tmp_path_factory.mktemp("slurm")) as made:
        yield made


def test_a_job_that_is_requeued_goes_on_with_its_sweep_and_one_that_is_cancelled_leaves_its_rows(
    cluster: Slurm, tmp_path: Path
) -> None:
    folder, log = tmp_path / "sweep", tmp_path / "job.log"
    surroundings = environment() | {"SWEEP": str(folder), "VENV": sys.prefix}
    done = Finished(0, "", "", folder)

    def sleeps(resumed: str) -> bool:
        """Whether the second cell is under way, of a sweep that has told this."""
        told = log.read_text() if log.exists() else ""
        at_work = len([*folder.glob("*/rank1.log")]) == 2 and len(alive_in(folder)) >= 3
        return resumed in told and at_work and len(done.rows) == 1

    words = ("--config-dir", str(TESTS / "conf"), *ASKED, *WAYS)
    at = ("--parsable", "--chdir", str(tmp_path), "--output", str(log))
    job = cluster.run("sbatch", *at, str(SCRIPT), *words, **surroundings)
    wait_for(lambda: sleeps(""))
    cluster.run("scontrol", "requeue", job)
    wait_for(lambda: cluster.state(job) == "PENDING" and alive_in(folder) == [])
    assert [row["status"] for row in done.rows] == ["pass"], log.read_text()

    cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now")
    wait_for(lambda: sleeps("resume: 1 of 2 cells are done"))
    cluster.run("scancel", "--signal=TERM", job)
    wait_for(lambda: cluster.state(job) not in ("RUNNING", "COMPLETING") and alive_in(folder) == [])
    assert [row["status"] for row in done.rows] == ["pass"], log.read_text()
    assert "interrupted: 1 of 2 cells have a row" in log.read_text()
