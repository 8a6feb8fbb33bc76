"""A rank of the second interpreter dies: the row of its cell says so, and later cells have ranks again."""

import re
from pathlib import Path
from typing import Any

import psutil
import pytest

from conftest import ONE_STEP, Finished, alive_in, blocks, run, selected

pytestmark = pytest.mark.slow

CAUSES = {
    ("kill", "build", 1): ("crash", r"rank 1 was killed by SIGKILL in build"),
    ("leaves_child", "load", 1): ("crash", r"rank 1 was killed by SIGKILL in load"),
    ("leaves_shared_memory", "train", 1): ("crash", r"rank 1 was killed by SIGKILL in train"),
    ("raises", "save", 0): ("error", r"rank 0 in save: ValueError: planted \(support/deaths.py:\d+\)"),
    ("segv", "save", 1): ("crash", r"rank 1 was killed by SIGSEGV in save at .*"),
    ("sleeps", "save", 1): ("timeout", r"after 2 s \(timeouts.save_s=2\) still in save \(rank .*"),
}
AFTER = {"workload.target": "support.trainers.Trainer", "checkpointer": "trainer"}


@pytest.fixture(scope="module")
def deaths(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    cells: list[dict[str, Any]] = []
    for how, phase, rank in selected(request, "how", "phase", "rank"):
        values = {"how": how, "phase": phase, "rank": rank}
        options = {f"scenario.options.{key}": value for key, value in values.items()}
        cells.append({"scenario": "dies_restarted", "model": "short", **options, "timeouts.save_s": 2})
    words = ("device=cpu", "world_size=2", "parallel=ddp", "saves=1", "retry=0", *ONE_STEP)
    ended = run(tmp_path_factory.mktemp("deaths") / "sweep", *blocks([*cells, AFTER]), *words)
    assert len(ended.rows) == len(cells) + 1, ended.err
    return ended


@pytest.mark.parametrize(
    ("how", "phase", "rank"),
    CAUSES,
)
def test_death_under_the_second_interpreter(deaths: Finished, how: str, phase: str, rank: int) -> None:
    (row,) = [one for one in deaths.rows if f"how={how}," in one["cell"]]
    status, reason = CAUSES[how, phase, rank]
    assert row["status"] == status
    assert re.fullmatch(reason, row["reason"]), row["reason"]
    checkpoints = deaths.folder / str(row["cell"]) / "checkpoints"
    if how == "leaves_child":
        assert not psutil.pid_exists(int((checkpoints / "child.pid").read_text()))
    if how == "leaves_shared_memory":
        left = (checkpoints / "segments").read_text().split()
        assert [name for name in left if Path("/dev/shm", name).exists()] == []


def test_cell_after_deaths_passes(deaths: Finished) -> None:
    row = deaths.rows[-1]
    assert (row["status"], row["restart"]) == ("pass", "interpreter"), row["reason"]
    assert alive_in(deaths.folder) == []
