"""Every cause of a rank's death, in every phase, is in the cell's row, and does not affect other cells."""

import ctypes
import itertools
import os
import re
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from conftest import ONE_STEP, SMALL, Finished, alive_in, blocks, cells_of, experiment, run, selected
from dcpbench.core.mismatch import Mismatch, Problem
from dcpbench.core.stage_end import StageEnd
from dcpbench.rank.messages import CellSpec, WorldSpec
from dcpbench.records.store import read_rows
from support import joining
from support.deaths import LATE_S
from support.drivers import plant
from support.pretended import jobs_in, sweep_of
from support.pretended_engine import healthy

pytestmark = pytest.mark.slow

LINE = r" \(support/deaths.py:\d+\)"
ON_ONE = "rank 1 in upload: CheckpointException: on rank 1:"
CAUSES = {
    ("raises", "build"): ("error", f"rank 0 in build without a save: ValueError: planted{LINE}"),
    ("raises", "upload"): ("error", f"{ON_ONE} ValueError: planted{LINE}"),
    ("raises_unprintable", "train"): (
        "error",
        f"rank 1 in train without a save: Unprintable{LINE} .*",
    ),
    ("raises_end_of_file", "load"): ("error", f"rank 1 in load: EOFError: Ran out of input{LINE}"),
    ("sys_exit", "save"): ("error", f"rank 0 in save: SystemExit: 3{LINE}"),
    ("sys_exit", "upload"): ("error", f"{ON_ONE.replace('1', '0')} SystemExit: 3{LINE}"),
    ("os_exit", "upload"): ("crash", r"rank 1 exited with status 7 in .*upload.*"),
    ("ends_late", "train"): ("crash", r"rank 1 exited with status 7 in train"),
    ("kill", "build"): ("crash", r"rank 1 was killed by SIGKILL in build"),
    ("kill", "upload"): ("crash", r"rank 0 was killed by SIGKILL in .*upload.*"),
    ("segv", "save"): ("crash", rf"rank 1 was killed by SIGSEGV in save at .*{LINE}"),
    ("segv", "upload"): (
        "crash",
        rf"rank 1 was killed by SIGSEGV in .*upload.* at .*{LINE}",
    ),
    ("out_of_memory", "upload"): ("error", r"rank 1 in upload: .*on rank 1: .*can't allocate memory.*"),
    ("full_disk", "upload"): ("error", r"rank 1 in upload: .*on rank 1: .*No space left on device.*"),
    ("file_size_limit", "upload"): ("error", r"rank 0 in upload: .*on rank 0: .*File too large.*"),
    ("read_only", "upload"): ("error", r"rank \d in upload: .*on rank \d: PermissionError: .*"),
    ("leaves_child", "load"): ("crash", r"rank 1 was killed by SIGKILL in load"),
    ("leaves_shared_memory", "train"): ("crash", r"rank 1 was killed by SIGKILL in train"),
}
HANGS = {
    ("loops", "train"): ("train_s", 1, "at _loops "),
    ("receives", "verify"): ("verify_s", 0, "at recv "),
    ("waits_for_thread", "load"): ("load_s", 1, "at _sleeps "),
    ("sleeps", "build"): ("build_s", 0, "at _sleeps "),
    ("sleeps", "save"): ("save_s", 1, "at _sleeps "),
    ("sleeps", "upload"): ("upload_s", 1, "at _sleeps "),
    ("stops", "load"): ("cell_s", 0, "stopped by a signal"),
}
RESTARTED = {
    ("kill", "build"): ("crash", r"rank 1 was killed by SIGKILL in build"),
    ("leaves_child", "load"): ("crash", r"rank 1 was killed by SIGKILL in load"),
    ("leaves_shared_memory", "train"): ("crash", r"rank 1 was killed by SIGKILL in train"),
    ("raises", "save"): ("error", r"rank 0 in save: ValueError: planted \(support/deaths.py:\d+\)"),
    ("segv", "save"): ("crash", r"rank 1 was killed by SIGSEGV in save at .*"),
    ("sleeps", "save"): ("timeout", r"after 2 s \(timeouts.save_s=2\) still in save \(rank .*"),
}
"""Deaths of ranks of the second interpreter."""
SOON_S = 5.0
CLONE_NEWNS, CLONE_NEWUSER = 0x20000, 0x10000000


@pytest.fixture(scope="module")
def deaths(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    chosen = {f"{how}_{phase}" for how, phase in selected(request, "how", "phase")}
    chosen |= {f"restarted_{how}_{phase}" for how, phase in selected(request, "cause", "during")}
    chosen |= {"kill_upload", "leaves_child_load", "leaves_shared_memory_train", "trainer"}
    known = cells_of("deaths")
    known["trainer"].pop("model")  # it has its own
    healthy, dying = known.pop("healthy"), [cell for name, cell in known.items() if name in chosen]
    cells = []
    for number, cell in enumerate(dying, 1):
        cells += [cell, {**healthy, "seed": number}] if number in (*range(0, 99, 5), len(dying)) else [cell]
    ended = run(tmp_path_factory.mktemp("deaths") / "sweep", *blocks(cells), timeout_s=280)
    assert len(ended.rows) == len(cells)
    return ended


def _row(deaths: Finished, how: str, phase: str, scenario: str = "dies") -> dict[str, Any]:
    rows = (row for row in deaths.rows if row["scenario"] == scenario)
    (row,) = (row for row in rows if f"how={how}," in row["cell"] and f"phase={phase}," in row["cell"])
    return row


def _folder(deaths: Finished, row: dict[str, Any]) -> Path:
    return deaths.folder / str(row["cell"])


@pytest.mark.parametrize(("how", "phase"), CAUSES)
def test_first_cause_names_rank_and_phase(deaths: Finished, how: str, phase: str) -> None:
    row = _row(deaths, how, phase)
    status, reason = CAUSES[how, phase]
    assert row["status"] == status
    assert re.fullmatch(reason, row["reason"]), row["reason"]
    first = row["details"]["rank"]
    assert row["reason"].startswith(f"rank {first} ")
    assert row["details"]["phase"] in row["reason"]
    log = (_folder(deaths, row) / f"rank{first}.log").read_text().splitlines()
    assert row["details"]["log_tail"] == log[-30:]
    assert row["flaky"] is None


@pytest.mark.parametrize(("how", "phase"), HANGS)
def test_hang_ends_at_the_limit_of_its_phase(deaths: Finished, how: str, phase: str) -> None:
    row = _row(deaths, how, phase)
    key, rank, doing = HANGS[how, phase]
    assert row["status"] == "timeout"
    limit_s = 8 if key == "cell_s" else 2
    assert row["reason"].startswith(f"after {limit_s} s (timeouts.{key}={limit_s}) still in {phase} (rank ")
    late = re.search(r"\(rank ([\d, ]+)\)", row["reason"])
    assert late
    assert str(rank) in late[1].split(", ")
    assert row["details"]["limit"] == f"timeouts.{key}"
    assert row["details"]["doing"][str(rank)].startswith(doing)
    for number in range(2):
        log = (_folder(deaths, row) / f"rank{number}.log").read_text()
        assert "most recent call first" in log, "every rank's stacks are in its log"


@pytest.mark.parametrize(("cause", "during"), RESTARTED)
def test_death_under_the_second_interpreter(deaths: Finished, cause: str, during: str) -> None:
    row = _row(deaths, cause, during, "dies_restarted")
    status, reason = RESTARTED[cause, during]
    assert row["status"] == status
    assert re.fullmatch(reason, row["reason"]), row["reason"]
    checkpoints = _folder(deaths, row) / "checkpoints"
    if cause == "leaves_child":
        assert not psutil.pid_exists(int((checkpoints / "child.pid").read_text()))
    if cause == "leaves_shared_memory":
        left = (checkpoints / "segments").read_text().split()
        assert [name for name in left if Path("/dev/shm", name).exists()] == []
    after = deaths.row(checkpointer="trainer")
    assert (after["status"], after["restart"]) == ("pass", "interpreter"), after["reason"]


def test_each_cell_has_one_row_and_others_pass(deaths: Finished) -> None:
    healthy = [row for row in deaths.rows if row["scenario"] == "save_load"]
    assert len(healthy) >= len(deaths.rows) // 6
    assert {row["status"] for row in healthy} == {"pass"}, deaths.err
    assert len({row["cell"] for row in deaths.rows}) == len(deaths.rows)
    assert deaths.status == 1


def test_only_checkpoints_of_dead_cells_are_kept(deaths: Finished) -> None:
    for row in deaths.rows:
        assert (_folder(deaths, row) / "checkpoints").exists() == (row["status"] != "pass")
    assert list(_folder(deaths, _row(deaths, "kill", "upload")).glob("checkpoints/step-*"))


def test_processes_of_dead_ranks_are_ended(deaths: Finished) -> None:
    row = _row(deaths, "leaves_child", "load")
    checkpoints = _folder(deaths, row) / "checkpoints"
    assert not psutil.pid_exists(int((checkpoints / "child.pid").read_text()))
    after = deaths.rows[deaths.rows.index(row) + 1]
    next_at = (_folder(deaths, after) / ".hydra" / "overrides.yaml").stat().st_mtime
    assert (checkpoints / "child.alive").stat().st_mtime < next_at, "it ends with its cell"
    assert alive_in(deaths.folder) == []


def test_shared_memory_of_dead_ranks_is_removed(deaths: Finished) -> None:
    folder = _folder(deaths, _row(deaths, "leaves_shared_memory", "train")) / "checkpoints"
    segments = (folder / "segments").read_text().split()
    assert len(segments) == 3
    assert [name for name in segments if Path("/dev/shm", name).exists()] == []
    assert "resource_tracker" not in deaths.err


def test_next_cell_begins_soon_after_a_death(deaths: Finished) -> None:
    gaps = {}
    for row, after in itertools.pairwise(deaths.rows):
        if row["scenario"] == "dies":
            died_at = (_folder(deaths, row) / "died").stat().st_mtime
            next_at = (_folder(deaths, after) / ".hydra" / "overrides.yaml").stat().st_mtime
            limits = [
                float(item.partition("=")[2]) for item in row["overrides"].split() if "timeouts" in item
            ]
            late_s = LATE_S if "ends_late" in row["cell"] else 0.0
            gaps[row["cell"]] = next_at - died_at - sum(limits) - late_s
    assert max(gaps.values()) < SOON_S, gaps


def test_retry_that_passes_is_flaky(sweep: Callable[..., Finished]) -> None:
    retried = sweep(*experiment("tried_again", ["once"]), *SMALL)
    (first,), (retry,) = retried.rows, retried.retries.values()
    assert (first["status"], first["flaky"], first["retry_of"]) == ("crash", True, None)
    assert first["reason"] == "rank 1 was killed by SIGKILL in load"
    assert (retry["status"], retry["flaky"], retry["retry_of"]) == ("pass", None, 0)
    assert retry["model_equal"] is True
    assert retried.status == 1
    assert "crash (flaky)" in retried.err
    assert retried.out.splitlines()[-1] == "1 cell: 1 crash, 1 flaky"
    for row in (first, retry):
        assert (_folder(retried, row) / "rank1.log").exists()
    assert list(_folder(retried, first).glob("checkpoints/step-*/.metadata")), (
        "those of the failed run are kept"
    )
    assert not (_folder(retried, retry) / "checkpoints").exists()


def test_repeated_mismatch_is_not_retried(tmp_path: Path) -> None:
    names = {"a": "w", "b": "w", "c": "v"}

    def end(spec: CellSpec) -> StageEnd:
        return healthy(WorldSpec(1, "cpu", False), Mismatch(names[spec.run.cell[0]], Problem.differs))

    sweep, _ = sweep_of(tmp_path, jobs_in(tmp_path, *names, retry=1), end)
    sweep.run()
    rows = {row["cell"]: row.flat() for row in read_rows(tmp_path)[0]}
    assert [*rows] == ["a", "a,repeat=1", "b", "c", "c,repeat=1"]
    assert rows["b"]["details"]["no_retry"] == "repeated by a retry in a"
    assert {name: rows[name]["flaky"] for name in names} == {"a": False, "b": None, "c": False}


def test_rank_that_never_joins_times_out(tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    overrides = ("parallel=ddp", "device=cpu", "world_size=2", "timeouts.join_s=2", "retry=0")
    alone = partial(plant, "dcpbench.executors.rank_group", "_RANK", joining.__name__)
    (row,) = run(folder, *overrides, prepare=alone, timeout_s=60).rows
    assert row["status"] == "timeout"
    assert row["reason"].startswith("after 2 s (timeouts.join_s=2) still in join (rank 0, 1); rank 0 at ")
    assert "rank 1 at join (support/joining.py:" in row["reason"]
    assert alive_in(folder) == []


def _small_disk(disk: Path) -> None:
    """Mount a file system of 600 kB that only this process and its children see."""
    user, group = os.geteuid(), os.getegid()
    if ctypes.CDLL(None).unshare(CLONE_NEWUSER | CLONE_NEWNS):
        raise OSError("no mount namespace")
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        Path("/proc/self", name).write_text(text)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", disk], check=True)


def test_full_disk_is_reported_and_then_freed(tmp_path: Path) -> None:
    """Use a real file system of 600 kB; a checkpoint takes 165 kB. A cell has one more than its saves
    while it saves the restored state."""
    disk, folder = tmp_path / "disk", tmp_path / "sweep"
    disk.mkdir()
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode:
        pytest.skip("cannot create a mount namespace")
    cells = ("parallel=ddp", "device=cpu", "world_size=2", "saves=6,2", "retry=0", *ONE_STEP)
    space = ("storage.keep_free_bytes=0", "storage.needs_bytes=0", f"storage.root={disk}")
    ended = run(folder, "-m", *cells, *space, "keep_checkpoints=none", prepare=partial(_small_disk, disk))
    assert len(ended.rows) == 2, ended.err
    full, next_one = ended.rows
    assert full["status"] == "error"
    reason = r"^rank \d in save: .* \(the disk of its checkpoints is full: \d+ bytes of 614400 are free\)$"
    assert re.search(reason, full["reason"]), full["reason"]
    assert next_one["status"] == "pass", next_one["reason"]
