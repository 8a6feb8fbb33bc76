"""Checks that a scenario makes by its own rules, each with a case that breaks them, and refusals."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from dcpbench.cell.cell import Cell
from dcpbench.core.mismatch import Mismatch, Place, Problem
from dcpbench.core.rank_report import Compared

_SLOT = 3
"""For saves of other things than a training run, whose slots may keep copies of its state."""


class Unsaveable:
    """A value that no writer can write; some stagers already refuse it."""

    refusal = "Unsaveable"
    """A word in the text of every refusal: a stager names the class, and so does `__reduce__`."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "Unsaveable":
        return self

    def __reduce__(self) -> str:
        raise TypeError(f"{type(self).__name__} is not to be saved")


def violation(name: str, text: str) -> Mismatch:
    """Return a violation of a scenario's rules, described by the scenario."""
    return Mismatch(name, Problem.contract, facts={"text": text})


def verify_refused(
    cell: Cell,
    kind: type[BaseException],
    message: str,
    refused: Callable[[], object],
    accepted: Callable[[], object],
    where: Place | str = "of the save",
) -> None:
    """Check that a call raises an exception of this kind whose text contains `message`. The negative control
    is `accepted`, the same call in an allowed way, which must not raise."""
    expected = f"expected {kind.__name__}: {message}"

    def raised(call: Callable[[], object]) -> BaseException | None:
        try:
            call()
        except (Exception, CheckpointException) as error:  # noqa: BLE001 - its type is what is checked
            return error
        return None

    def wrong(error: BaseException | None) -> list[Mismatch]:
        if isinstance(error, kind) and message in str(error):
            return []
        got = f"got {type(error).__name__}: {error}" if error else "it was not refused"
        return [violation("refusal", f"{expected}; {got}")]

    mismatches, unexpected = wrong(raised(refused)), raised(accepted)
    control = wrong(unexpected) if unexpected is None else []
    cell.record("contract_held", Compared.of(mismatches, control, ["refusal"]), where)


def verify_refused_beside(cell: Cell) -> None:
    """Check that a save which cannot be written fails while another one is in flight: its future raises on
    every rank, and it leaves no complete checkpoint."""
    refused, accepted = (str(cell.folder / name) for name in ("refused", "accepted"))

    def save(value: Any, checkpoint_id: str) -> None:
        cell.checkpointer.save({"beside": {"value": value}}, checkpoint_id, _SLOT).wait()

    def keys_in(checkpoint_id: str) -> list[Mismatch]:
        entries = cell.checkpointer.manifest(checkpoint_id).entries if cell.world.rank == 0 else {}
        return [violation(key, "its save failed, and it is in a complete checkpoint") for key in entries]

    calls = partial(save, Unsaveable(), refused), partial(save, 1, accepted)
    with cell.phase("verify", "refused"):
        where = Place("save_beside")
        verify_refused(cell, BaseException, Unsaveable.refusal, *calls, where)
        names = ["beside.value"] if cell.world.rank == 0 else []
        cell.record("contract_held", Compared.of(keys_in(refused), keys_in(accepted), names), where)
