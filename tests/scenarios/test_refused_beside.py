"""A save that must be refused while others are in flight, on one rank in this process."""

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from dcpbench.cell.contract import Unsaveable, verify_refused, verify_refused_beside
from dcpbench.checkpointers.base import PendingSave
from dcpbench.checkpointers.dcp import DcpCheckpointer
from dcpbench.core.mismatch import Mismatch, Place
from dcpbench.formats.audit import Entry, Manifest
from support.alone import TWICE, Ran, bare_cell, group_of_one, run_alone, world

pytestmark = pytest.mark.cell

WHERE = Place("save_beside")


def overlapping(defect: AbstractContextManager[Any], **values: Any) -> Ran:
    with defect, group_of_one() as group:
        return run_alone(**TWICE, save="async", overlap_saves=True, **values, seen_by=world(group=group))


def failing_in_silence() -> AbstractContextManager[Any]:
    """Make the future of a failed upload report success."""
    honest = PendingSave._complete

    def complete(pending: PendingSave, upload: Future[Any]) -> None:
        done: Future[Any] = Future()
        done.set_result(None)
        honest(pending, done if upload.exception() else upload)

    return mock.patch.object(PendingSave, "_complete", complete)


def failing_in_part() -> AbstractContextManager[Any]:
    """Make a failed save leave a complete checkpoint of something else."""
    honest = DcpCheckpointer.save

    def save(self: DcpCheckpointer, state: dict[str, Any], checkpoint_id: str, slot: int = 0) -> PendingSave:
        if isinstance(state.get("beside", {}).get("value"), Unsaveable):
            honest(self, {"beside": {"value": 0}}, checkpoint_id, slot).wait()
            raise RuntimeError(Unsaveable.refusal)
        return honest(self, state, checkpoint_id, slot)

    return mock.patch.object(DcpCheckpointer, "save", save)


def test_refusal_is_raised_by_its_own_future() -> None:
    ran = overlapping(nullcontext())
    assert ran.verdict.status == "pass", ran.verdict.reason
    report = ran.reports[0].checks["contract_held"]
    assert report.control[WHERE] == {"refusal": True, "beside.value": True}
    assert {"refused", "accepted"} <= set(ran.left)


@pytest.mark.parametrize(
    ("defect", "found"), [(failing_in_silence, "refusal"), (failing_in_part, "beside.value")]
)
def test_missing_refusal_is_reported(defect: Callable[[], AbstractContextManager[Any]], found: str) -> None:
    ran = overlapping(defect())
    assert {one.check: one.names for one in ran.verdict.failed} == {"contract_held": [found]}
    (worst,) = ran.reports[0].checks["contract_held"].distinct.values()
    assert isinstance(worst, Mismatch)
    assert worst.where == WHERE


@pytest.mark.parametrize("rank", [0, 1])
def test_only_rank_0_reads_leftovers(rank: int, tmp_path: Path) -> None:
    cell = bare_cell(tmp_path, seen_by=world(rank, 2))
    asked: list[str] = []

    class Checkpoints:
        def save(self, state: dict[str, Any], checkpoint_id: str, slot: int) -> PendingSave:
            assert slot not in (0, 1, 2), "what they keep is a training run's"
            if isinstance(state["beside"]["value"], Unsaveable):
                raise RuntimeError(Unsaveable.refusal)
            return PendingSave(0.0, 1.0)

        def manifest(self, checkpoint_id: str) -> Manifest:
            asked.append(Path(checkpoint_id).name)
            return Manifest({"beside.value": Entry()} if asked[-1] == "accepted" else {}, {}, {})

    vars(cell)["checkpointer"] = Checkpoints()
    verify_refused_beside(cell)
    report = cell.report.checks["contract_held"]
    assert asked == ([] if rank else ["refused", "accepted"])
    assert report.count == 0
    assert report.control[WHERE] == {"refusal": True, **({} if rank else {"beside.value": True})}


@pytest.mark.parametrize(
    ("refused", "accepted", "found", "detected"),
    [
        (KeyError("absent"), None, 0, True),
        (None, None, 1, True),
        (KeyError("other"), None, 1, True),
        (KeyError("absent"), KeyError("absent"), 0, False),
        (KeyError("absent"), KeyError("other"), 0, False),
    ],
)
def test_control_of_a_refusal_must_be_accepted(
    refused: Exception | None, accepted: Exception | None, found: int, detected: bool, tmp_path: Path
) -> None:
    def call(error: Exception | None) -> Callable[[], None]:
        return mock.Mock(side_effect=error)

    cell = bare_cell(tmp_path)
    verify_refused(cell, KeyError, "absent", call(refused), call(accepted))
    report = cell.report.checks["contract_held"]
    assert (report.count, report.control) == (found, {Place("of the save"): {"refusal": detected}})
