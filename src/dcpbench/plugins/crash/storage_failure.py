"""The storage fails in a save, or in a load, as `storage=failing` says: all ranks are told, or what was saved
is there and comes back. A save that failed leaves nothing that is taken for a checkpoint, and the next one
into its place is as good as any; so is the next load."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch.distributed.checkpoint.api import CheckpointException

from dcpbench.cell import checks, contract, steps
from dcpbench.cell.cell import Cell
from dcpbench.cell.checkpoint import SavedCheckpoint
from dcpbench.checkpointers.base import Checkpointer
from dcpbench.checkpointers.on_disk import FolderState, audited
from dcpbench.core.mismatch import Mismatch
from dcpbench.core.rank_report import Compared, Skip
from dcpbench.plugins.crash.failing import has_met, sound_storage
from dcpbench.verify.compare_layouts import gathered

_OLDER, _NEWER = "older", "newer"


def storage_failure(cell: Cell) -> None:
    """A checkpoint is saved where nothing fails, then a newer one, which is loaded; the second save, or the
    load, meets the failure.

    Raises:
        Skip: no rank met it.
    """
    storage, train_steps = cell.config.storage, cell.config.train_steps
    sound = cell.vary(storage=sound_storage(storage))
    reference = steps.build(cell)
    in_load = storage.options["of"] == "load"
    checkpointer, failing = steps.open_checkpointer(sound), steps.open_checkpointer(cell)
    steps.advance(cell, reference, until=train_steps)
    steps.finish(cell, steps.save(cell, reference.trained, checkpointer, _OLDER))
    steps.advance(cell, reference, until=2 * train_steps)

    newer: list[SavedCheckpoint] = []

    def save(by: Checkpointer) -> None:
        newer[:] = [steps.save(cell, reference.trained, by, _NEWER)]
        newer[0].pending.wait()

    if in_load:
        save(checkpointer)
    elif _is_told(cell, lambda: save(failing), "of the save"):
        _verify_left(cell)
        save(checkpointer)
    steps.finish(cell, newer[0])
    if not in_load:
        _skip_unless_met(cell)
    if any(gathered(cell.report.checks["checkpoint_whole"].count, cell.world.group)):
        return  # what a load of it brings is nobody's to say
    target, saved = steps.build_target(cell), replace(newer[0], checkpointer=checkpointer)
    if in_load:
        before = checks.make_different(cell, target, saved)
        by_failing = replace(saved, checkpointer=failing)
        told = _is_told(cell, lambda: steps.load(cell, target, by_failing), "of the load")
        _skip_unless_met(cell)
        if not told:
            checks.verify_restored(cell, target, saved, before)
            return
        target = steps.build_target(cell, 1)  # some of it may have been loaded
    checks.load_and_verify(cell, target, saved, 1)


def _is_told(cell: Cell, do: Callable[[], None], where: str) -> bool:
    """Whether a save or a load raises; it has to on all ranks or on none."""
    try:
        do()
        raised = False
    except (Exception, CheckpointException):  # noqa: BLE001 - which it is, is the storage's to say
        raised = True

    def wrong(heard: Sequence[bool]) -> list[Mismatch]:
        silent = [rank for rank, was_told in enumerate(heard) if not was_told] if any(heard) else []
        return [contract.violation("the failure", f"rank {rank} was not told") for rank in silent]

    told = gathered(raised, cell.world.group)
    cell.record("contract_held", Compared.of(wrong(told), wrong([True, False]), ["the failure"]), where)
    return any(told)


def _verify_left(cell: Cell) -> None:
    """What a save that failed has left is not taken for a checkpoint. The control is one that is."""

    def wrong(name: str) -> list[Mismatch]:
        is_whole = cell.world.rank == 0 and audited(cell.folder / name).state is FolderState.whole
        return [contract.violation("what is left", "it is a whole checkpoint")] if is_whole else []

    names = ["what is left"] if cell.world.rank == 0 else []
    cell.record("contract_held", Compared.of(wrong(_NEWER), wrong(_OLDER), names), "of the save that failed")


def _skip_unless_met(cell: Cell) -> None:
    if not any(gathered(has_met(cell.folder / _NEWER), cell.world.group)):
        raise Skip(f"{cell.config.storage.name}: no rank came to the operation that fails")
