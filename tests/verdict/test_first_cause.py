"""The first cause of a stage's end, and its sentence in the row."""

from dataclasses import replace
from typing import Any

import pytest

from dcpbench.core.mismatch import RaisedError
from dcpbench.core.notes import Note
from dcpbench.core.rank_report import RankReport
from dcpbench.core.stage_end import Failed, HostUsed, RankEnd, StageEnd
from dcpbench.verdict.first_cause import StageStop, stop_of
from dcpbench.verdict.sentences import cause_sentence
from support.ends import on, reported

ABORTED, KILLED = -6, -9
HOSTS = (HostUsed("10.0.0.1", (0, 1), 0.0, 0.0),)


def failed(rank: int, at: float, secondary: bool = False) -> RankEnd:
    """A rank that raised."""
    error = RaisedError(rank, "save", "ValueError", f"of rank {rank}")
    return replace(on(rank), phase="upload", failed=Failed(at, error, secondary))


def gone(rank: int, at: float, exit_status: int | None = KILLED, **more: Any) -> RankEnd:
    """A rank that died."""
    return replace(on(rank), exited_at=at, exit_status=exit_status, **more)


def ended(rank: int, **more: Any) -> RankEnd:
    """A rank that reported."""
    return replace(on(rank), report=RankReport(rank), **more)


def stop(*ranks: RankEnd, **more: Any) -> StageStop:
    found = stop_of(StageEnd(ranks, **more))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("ranks", "status", "first"),
    [
        ([failed(0, 2.0), failed(1, 1.0)], "error", 1),
        ([failed(0, 1.0, secondary=True), failed(1, 9.0)], "error", 1),
        ([failed(0, 1.0, secondary=True), gone(1, 9.0)], "crash", 1),
        ([failed(0, 2.0, secondary=True), failed(1, 1.0, secondary=True)], "error", 1),
        ([failed(0, 1.0), gone(1, 1.2)], "crash", 1),
        ([failed(0, 1.0), gone(1, 1.3)], "error", 0),
        ([failed(0, 1.0), gone(1, 1.2, ABORTED)], "error", 0),
        ([gone(0, 1.0, ABORTED), gone(1, 1.2)], "crash", 1),
        ([failed(0, 1.0, secondary=True), ended(1, exit_status=KILLED)], "crash", 1),
        ([failed(0, 1.0, secondary=True), ended(1)], "error", 0),
        ([failed(0, 1.0), ended(1, exit_status=KILLED)], "error", 0),
    ],
)
def test_first_cause(ranks: list[RankEnd], status: str, first: int) -> None:
    found = stop(*ranks)
    assert (found.status, found.details["rank"]) == (status, first)
    assert found.details["phase"] == ("save" if status == "error" else "load")


def test_errors_of_every_rank_are_kept() -> None:
    found = stop(failed(0, 3.0, secondary=True), failed(1, 1.0), failed(2, 2.0), ended(3))
    assert [error.rank for error in found.raised] == [1, 2]
    assert [error.rank for error in stop(failed(0, 1.0, secondary=True)).raised] == [0]


@pytest.mark.parametrize(
    ("end", "dies", "status"),
    [
        (reported([RankReport(0)]), None, None),
        (reported([RankReport(0)]), "x.y", "error"),
        (StageEnd((gone(0, 1.0), ended(1))), "x.y", None),
        (StageEnd((gone(0, 1.0), ended(1))), None, "crash"),
        (StageEnd((failed(0, 1.0), ended(1))), "x.y", "error"),
        (StageEnd((on(0), ended(1)), ("load", 2.0)), "x.y", "timeout"),
        (StageEnd(skip="no"), "x.y", "skip"),
        (StageEnd(not_run="no"), "x.y", "error"),
    ],
)
def test_death_is_expected_in_a_dying_stage(end: StageEnd, dies: str | None, status: str | None) -> None:
    found = stop_of(end, dies)
    assert (found and found.status) == status


@pytest.mark.parametrize(
    ("rank", "sentence"),
    [
        (gone(1, 1.0), "rank 1 was killed by SIGKILL in load"),
        (gone(1, 1.0, 7), "rank 1 exited with status 7 in load"),
        (gone(1, 1.0, -11, frame="f (a.py:1)"), "rank 1 was killed by SIGSEGV in load at f (a.py:1)"),
        (gone(1, 1.0, None), "rank 1 was lost in load"),
        (
            gone(1, 1.0, None, lost="did not answer, last heard of"),
            "rank 1 did not answer, last heard of in load",
        ),
        (gone(1, 1.0, uploads=(0.5,)), "rank 1 was killed by SIGKILL in load, an upload in flight"),
        (gone(1, 1.0, phase="upload", uploads=(0.5,)), "rank 1 was killed by SIGKILL in upload"),
        (
            gone(1, 1.0, 255),
            "rank 1 exited with status 255, or was lost together with the agent that forked it, in load",
        ),
    ],
)
def test_death_sentence_names_signal_and_phase(rank: RankEnd, sentence: str) -> None:
    found = stop(rank, ended(0))
    assert found.cause is not None
    assert cause_sentence(found.cause) == sentence
    assert "host" not in found.details
    found = stop(rank, ended(0), hosts=HOSTS)
    assert found.cause is not None
    assert cause_sentence(found.cause, place=found.place) == sentence.replace(
        "rank 1", "rank 1 (local rank 1 of host here)"
    )
    assert (found.details["host"], found.details["local_rank"]) == ("here", 1)


def test_only_ranks_in_the_limits_phase_are_late() -> None:
    ranks = (
        replace(on(0), doing="at f (a.py:1)"),
        replace(on(1), phase="train", uploads=(1.0,)),
        ended(2),
        replace(on(3), phase="upload"),
    )
    for phase, late in (
        ("load", "still in load (rank 0), others in train, an upload in flight (rank 1); upload (rank 3)"),
        ("upload", "still in upload (rank 1, 3), others in load (rank 0)"),
        ("cell", "still in load (rank 0); train, an upload in flight (rank 1); upload (rank 3)"),
    ):
        found = stop(*ranks, limit=(phase, 2.0))
        assert found.cause is not None
        said = f"after 2 s (timeouts.{phase}_s=2) {late}; rank 0 at f (a.py:1); stacks are in the ranks' logs"
        assert cause_sentence(found.cause) == said
        assert found.details == {"limit": f"timeouts.{phase}_s", "doing": {"0": "at f (a.py:1)"}}
    found = stop(*ranks[1:], replace(ranks[0], rank=4), limit=("load", 2.0))
    assert found.details["doing"] == {"4": "at f (a.py:1)"}
    found = stop(*ranks[1:], limit=("upload", 2.0))
    assert found.cause is not None
    assert cause_sentence(found.cause).endswith("upload (rank 1, 3); stacks are in the ranks' logs")
    of_hosts = stop(*ranks, limit=("load", 2.0), hosts=HOSTS)
    assert of_hosts.cause is not None
    assert "still in load (rank 0 of host here), others" in cause_sentence(of_hosts.cause)


def test_only_clean_ranks_are_reused() -> None:
    clean = reported([RankReport(0), RankReport(1)])
    assert clean.is_clean
    assert not reported([RankReport(0), RankReport(1, notes=[Note("left_behind", "a thread")])]).is_clean
    assert not StageEnd((*clean.ranks, on(2)), ("load", 1.0)).is_clean
    assert not StageEnd(not_run="no").is_clean
    assert not StageEnd(skip="no").is_clean
