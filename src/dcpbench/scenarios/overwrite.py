"""Save, save again into the same place, and save there once more when that is forbidden."""

from dataclasses import replace

from torch.distributed.checkpoint.api import CheckpointException

from dcpbench.scenarios import checks, steps
from dcpbench.scenarios.cell import Cell
from dcpbench.scenarios.checkpoint import SavedCheckpoint

NAME = "checkpoint"


def overwrite(cell: Cell) -> None:
    """The second values come back; the third save is refused and the second checkpoint still whole."""
    oracle = steps.build(cell)
    overwriting = steps.open_checkpointer(_overwriting(cell, True))
    refusing = steps.open_checkpointer(_overwriting(cell, False))

    def save() -> SavedCheckpoint:
        until = oracle.trained.train_state.step + cell.config.train_steps
        steps.train(cell, oracle.trained, oracle.data, until)
        saved = steps.save(cell, oracle.trained, overwriting, NAME)
        steps.finish(cell, saved)
        return saved

    save()
    second = save()
    steps.train(cell, oracle.trained, oracle.data, second.step + cell.plan.resume_steps)

    def save_again() -> None:
        steps.finish(cell, steps.save(cell, oracle.trained, refusing, NAME))

    def save_elsewhere() -> None:
        steps.finish(cell, steps.save(cell, oracle.trained, refusing, "elsewhere"))

    checks.verify_refused(cell, CheckpointException, "Checkpoint already exists", save_again, save_elsewhere)
    checks.verify_twin(cell, oracle)

    target = steps.build_anew(cell)
    checks.load_and_verify(cell, target, second)
    checks.resume(cell, target, second, oracle.losses)


def _overwriting(cell: Cell, allowed: bool) -> Cell:
    storage = cell.config.storage
    return cell.vary(storage=replace(storage, options={**storage.options, "overwrite": allowed}))
