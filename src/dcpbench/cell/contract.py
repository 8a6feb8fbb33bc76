"""Checks that a scenario makes by judgements of its own, each with a case that is wrong on purpose; and what
has to be refused."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from dcpbench.cell.cell import Cell
from dcpbench.checkpointers.base import Checkpointer
from dcpbench.core.mismatch import Mismatch, Problem
from dcpbench.core.rank_report import Compared

_SLOT = 3
"""Of saves of something else than a training run, whose own slots may keep copies of that."""


class Unsaveable:
    """What no writer can write; some stagers refuse it already."""

    refusal = "Unsaveable"
    """What every refusal has in its text: a stager names the class, and `__reduce__` does."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "Unsaveable":
        return self

    def __reduce__(self) -> str:
        raise TypeError(f"{type(self).__name__} is not to be saved")


def violation(name: str, text: str) -> Mismatch:
    """A violation of a scenario's contract, in its own words."""
    return Mismatch(name, Problem.contract, facts={"text": text})


def verify_refused(
    cell: Cell,
    kind: type[BaseException],
    message: str,
    refused: Callable[[], None],
    accepted: Callable[[], None],
    where: str = "of the save",
) -> None:
    """What must be refused was, with an exception of this kind and a message that holds these words.
    `accepted` is the same call in a way that is allowed: the negative control."""
    expected = f"expected {kind.__name__}: {message}"

    def wrong(call: Callable[[], None]) -> list[Mismatch]:
        try:
            call()
        except (Exception, CheckpointException) as error:  # noqa: BLE001 - which it is, is the question
            if isinstance(error, kind) and message in str(error):
                return []
            return [violation("refusal", f"{expected}; got {type(error).__name__}: {error}")]
        return [violation("refusal", f"{expected}; it was not refused")]

    cell.record("contract_held", Compared.of(wrong(refused), wrong(accepted), ["refusal"]), where)


def verify_refused_beside(cell: Cell, checkpointer: Checkpointer) -> None:
    """While another save is under way one cannot be written: this is told by its own future, on every rank,
    and no complete checkpoint is left there."""
    refused, accepted = (str(cell.folder / name) for name in ("refused", "accepted"))

    def save(value: Any, checkpoint_id: str) -> None:
        checkpointer.save({"beside": {"value": value}}, checkpoint_id, _SLOT).wait()

    calls = partial(save, Unsaveable(), refused), partial(save, 1, accepted)
    with cell.phase("verify", "refused"):
        where = "of a save that cannot be written, beside another"
        verify_refused(cell, BaseException, Unsaveable.refusal, *calls, where)
        left, whole = (
            _keys_of(checkpointer, one) if cell.world.rank == 0 else [] for one in (refused, accepted)
        )
        names = ["beside.value"] if cell.world.rank == 0 else []
        cell.record("contract_held", Compared.of(left, whole, names), where)


def _keys_of(checkpointer: Checkpointer, checkpoint_id: str) -> list[Mismatch]:
    entries = checkpointer.manifest(checkpoint_id).entries
    return [violation(key, "its save failed, and it is in a complete checkpoint") for key in entries]
