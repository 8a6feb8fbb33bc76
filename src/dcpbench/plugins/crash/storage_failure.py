"""Make the storage fail in a save or a load, as `storage=failing` specifies. Either all ranks have to raise,
or the state has to be saved and restored correctly. A failed save must not leave what looks like a
checkpoint, and the next save to the same place, or the next load, has to succeed."""

from collections.abc import Callable, Sequence

from torch.distributed.checkpoint.api import CheckpointException

from dcpbench.cell import checks, contract, steps
from dcpbench.cell.cell import Cell
from dcpbench.cell.checkpoint import SaveInFlight
from dcpbench.core.mismatch import Mismatch
from dcpbench.core.rank_report import Compared, Skip
from dcpbench.formats.on_disk import FolderState, audited
from dcpbench.plugins.crash.failing import has_failed, sound_storage

_OLDER, _NEWER = "older", "newer"


def storage_failure(cell: Cell) -> None:
    """Save a checkpoint without failures, then save and load a newer one; the second save, or its load,
    fails.

    Raises:
        Skip: no rank made the operation that fails.
    """
    storage, train_steps = cell.config.storage, cell.config.steps_before_save
    sound = cell.vary(storage=sound_storage(storage))
    reference = steps.build_reference(cell)
    in_load = storage.options["of"] == "load"
    steps.train_reference(cell, reference, until=train_steps)
    steps.finish(sound, steps.save(sound, reference.live_run, _OLDER))
    steps.train_reference(cell, reference, until=2 * train_steps)

    newer: list[tuple[Cell, SaveInFlight]] = []

    def save(by: Cell) -> None:
        newer[:] = [(by, steps.save(by, reference.live_run, _NEWER))]
        newer[0][1].pending.wait()

    if in_load:
        save(sound)
    elif _raises(cell, lambda: save(cell), "of the save"):
        _verify_leftovers(cell)
        save(sound)
    saved = steps.finish(*newer[0])
    if not in_load:
        _skip_unless_failed(cell)
    if cell.world.any_rank(cell.report.checks["checkpoint_whole"].count):
        return  # the result of its load is undefined
    steps.decide_compared_state(cell, reference, [saved])
    target = steps.build_target(cell, reference)
    if in_load:
        before = checks.perturb_target(cell, target, saved)
        raised = _raises(cell, lambda: steps.load(cell, target, saved), "of the load")
        _skip_unless_failed(cell)
        if not raised:
            checks.verify_restored(sound, target, saved, before)
            return
        target = steps.build_target(cell, reference, 1)  # some of it may have been loaded
    checks.load_and_verify(sound, target, saved, 1)


def _raises(cell: Cell, do: Callable[[], None], where: str) -> bool:
    """Return whether a save or a load raises, and check that it does on all ranks or on none."""
    try:
        do()
        raised = False
    except (Exception, CheckpointException):  # noqa: BLE001 - the type depends on the storage
        raised = True

    def wrong(raised: Sequence[bool]) -> list[Mismatch]:
        silent = [rank for rank, has_raised in enumerate(raised) if not has_raised] if any(raised) else []
        return [contract.violation("the failure", f"rank {rank} did not raise") for rank in silent]

    on_ranks = cell.world.gathered(raised)
    cell.record("contract_held", Compared.of(wrong(on_ranks), wrong([True, False]), ["the failure"]), where)
    return any(on_ranks)


def _verify_leftovers(cell: Cell) -> None:
    """Check that a failed save has left no complete checkpoint. The control is a complete one."""

    def wrong(name: str) -> list[Mismatch]:
        is_complete = cell.world.rank == 0 and audited(cell.folder / name).state is FolderState.complete
        return [contract.violation("what is left", "it is a complete checkpoint")] if is_complete else []

    names = ["what is left"] if cell.world.rank == 0 else []
    cell.record("contract_held", Compared.of(wrong(_NEWER), wrong(_OLDER), names), "of the save that failed")


def _skip_unless_failed(cell: Cell) -> None:
    if not cell.world.any_rank(has_failed(cell.folder / _NEWER)):
        raise Skip(f"{cell.config.storage.name}: no rank made the operation that fails")
