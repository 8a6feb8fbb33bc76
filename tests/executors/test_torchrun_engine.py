"""Cells on the processes of torchrun: two of it, with two ranks each, really started and really killed."""

import os
import re
import signal
from pathlib import Path

import pytest

from conftest import SMALL, Finished, alive_in, wait_for
from support.elastic import driver_of, torchrun

pytestmark = pytest.mark.multinode

DIES = (
    *SMALL,
    "device=cpu",
    "saves=1",
    "parallel=hsdp2",
    "scenario=dies",
    "scenario.options.rank=3",
    "retry=0",
)
LAST_RANK = r"rank 3 \(local rank 1 of host 127\.0\.0\.1/1\)"


@pytest.fixture(scope="module")
def deaths(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("deaths") / "sweep"
    ways = "scenario.options.how=kill,kills_actor,not"
    with torchrun(folder, "-m", *DIES, ways, "scenario.options.phase=load", max_restarts=1) as hosts:
        return hosts.ended()


@pytest.mark.parametrize(
    ("how", "status", "reason"),
    [
        ("kill", "crash", rf"{LAST_RANK} was killed by SIGKILL in load"),
        ("kills_actor", "crash", rf"{LAST_RANK} was lost with its process of torchrun, which died, last .*"),
        ("not", "pass", ""),
    ],
)
def test_what_died_has_one_row_and_the_sweep_goes_on_with_the_next_cell(
    deaths: Finished, how: str, status: str, reason: str
) -> None:
    assert len(deaths.rows) == 3, deaths.err
    (row,) = [row for row in deaths.rows if f"how={how} " in row["overrides"]]
    assert row["status"] == status, row["reason"]
    assert re.fullmatch(reason, row["reason"] or ""), row["reason"]


def test_the_ranks_are_those_of_torchrun(deaths: Finished) -> None:
    (row,) = [row for row in deaths.rows if row["status"] == "pass"]
    assert row["world_size"] == 4, "as many as there are processes"
    of_ranks = [(rank["host"], rank["local_rank"]) for rank in row["details"]["ranks"]]
    assert of_ranks == [(f"127.0.0.1/{host}", local) for host in range(2) for local in range(2)]
    assert row["config"]["parallel.dp_replicate"] == 2
    assert deaths.status == 1
    # torchrun kills its processes, and does not wait for what they have started.
    wait_for(lambda: not alive_in(deaths.folder))


def test_a_driver_that_was_killed_is_followed_by_another_and_a_job_that_is_cancelled_leaves_its_rows(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "sweep"
    ways = ("scenario.options.how=not,sleeps", "scenario.options.phase=train")
    with torchrun(folder, "-m", *DIES, *ways, max_restarts=1) as hosts:

        def sleeps() -> bool:
            return bool([*folder.glob("*how=sleeps*/rank3.log")]) and len(alive_in(folder)) >= 5

        wait_for(sleeps)
        first = driver_of(folder)
        assert first
        os.kill(first.pid, signal.SIGKILL)
        wait_for(lambda: "resume: 1 of 2 cells are done" in hosts.log.read_text() and sleeps())
        hosts.end()
        ended = hosts.ended()
        wait_for(lambda: alive_in(folder) == [] and driver_of(folder) is None)
    assert [row["status"] for row in ended.rows] == ["pass"]
    assert f"broken off: torchrun has ended; go on with resume={folder}" in hosts.log.read_text()
