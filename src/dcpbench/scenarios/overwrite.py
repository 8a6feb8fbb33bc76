"""Save, save again into the same place, and save there once more when that is forbidden."""

from dataclasses import replace

from torch.distributed.checkpoint.api import CheckpointException

from dcpbench.scenarios import checks, steps
from dcpbench.scenarios.cell import Cell

NAME = "checkpoint"


def overwrite(cell: Cell) -> None:
    """The second values come back; the third save is refused and the second checkpoint still whole."""
    oracle = steps.build(cell)
    storage = steps.open_storage(_overwriting(cell, True))
    refusing = steps.open_storage(_overwriting(cell, False))

    def save() -> steps.Checkpoint:
        until = oracle.trained.train_state.step + cell.config.train_steps
        steps.train(cell, oracle.trained, oracle.data, until)
        return steps.save(cell, oracle.trained, storage, NAME)

    first = save()
    steps.finish(cell, first)
    second = save()
    steps.finish(cell, second)
    steps.train(cell, oracle.trained, oracle.data, second.step + cell.plan.resume_steps)

    def save_again() -> None:
        again = steps.save(cell, oracle.trained, refusing, NAME)
        steps.finish(cell, again)

    def save_elsewhere() -> None:
        other = steps.save(cell, oracle.trained, refusing, "elsewhere")
        steps.finish(cell, other)

    checks.verify_refused(cell, CheckpointException, "Checkpoint already exists", save_again, save_elsewhere)
    checks.verify_twin(cell, oracle)

    target = steps.build_anew(cell)
    steps.make_different(cell, target, 0)
    checks.prove_power(cell, target, second)
    steps.load(cell, target, second)
    checks.verify_restored(cell, target, second)
    resumed = steps.train(cell, target, oracle.data, second.step + cell.plan.resume_steps)
    checks.verify_resumed(cell, target, resumed, second, oracle, 0)


def _overwriting(cell: Cell, allowed: bool) -> Cell:
    storage = cell.config.storage
    return cell.vary(storage=replace(storage, options={**storage.options, "overwrite": allowed}))
