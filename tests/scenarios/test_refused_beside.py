"""A save that must be refused, beside others that are under way: on one rank that is this process."""

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import pytest

from dcpbench.checkpointers.base import PendingSave
from dcpbench.checkpointers.dcp import DcpCheckpointer
from dcpbench.records.findings import Finding
from dcpbench.scenarios.contract import Unsaveable
from support.alone import Ran, group_of_one, run_alone, world

WHERE = "of a save that cannot be written, beside another"


def overlapping(defect: AbstractContextManager[Any], **values: Any) -> Ran:
    small = {"model": "short", "train_steps": 1, "resume_steps": 1, "saves": 2}
    with defect, group_of_one() as group:
        return run_alone(**small, save="async", overlap_saves=True, **values, seen_by=world(group=group))


def failing_in_silence() -> AbstractContextManager[Any]:
    """The future of an upload that failed says that the checkpoint is complete."""
    honest = PendingSave._complete

    def complete(pending: PendingSave, upload: Future[Any]) -> None:
        done: Future[Any] = Future()
        done.set_result(None)
        honest(pending, done if upload.exception() else upload)

    return mock.patch.object(PendingSave, "_complete", complete)


def failing_in_part() -> AbstractContextManager[Any]:
    """A save that fails leaves a complete checkpoint of something else."""
    honest = DcpCheckpointer.save

    def save(self: DcpCheckpointer, state: dict[str, Any], checkpoint_id: str, slot: int = 0) -> PendingSave:
        if isinstance(state.get("beside", {}).get("value"), Unsaveable):
            honest(self, {"beside": {"value": 0}}, checkpoint_id, slot).wait()
            raise RuntimeError(Unsaveable.refusal)
        return honest(self, state, checkpoint_id, slot)

    return mock.patch.object(DcpCheckpointer, "save", save)


def test_it_is_told_by_its_own_future_and_the_others_are_whole() -> None:
    ran = overlapping(nullcontext())
    assert ran.verdict.status == "pass", ran.verdict.reason
    report = ran.reports[0].checks["contract_held"]
    assert report.control[WHERE] == {"refusal": True, "beside.value": True}
    assert {"refused", "accepted"} <= set(ran.left)


@pytest.mark.parametrize(
    ("defect", "found"), [(failing_in_silence, "refusal"), (failing_in_part, "beside.value")]
)
def test_one_that_is_not_refused_as_it_should_be_is_seen(
    defect: Callable[[], AbstractContextManager[Any]], found: str
) -> None:
    ran = overlapping(defect())
    assert {one.check: one.names for one in ran.verdict.failed} == {"contract_held": [found]}
    (worst,) = ran.reports[0].checks["contract_held"].worst
    assert isinstance(worst, Finding)
    assert worst.where == WHERE
