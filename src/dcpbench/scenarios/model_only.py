"""Save the model alone, as it is published once it is trained, and load it into a model that was built anew:
by the cell's own way, and by every other that reads what it wrote."""

from dataclasses import replace
from typing import Any

from dcpbench.cell import checks, steps
from dcpbench.cell.cell import Cell
from dcpbench.workloads.training_run import TrainingRun


def model_only(cell: Cell) -> None:
    """The model comes back bit for bit, and its checkpoint holds nothing else."""
    reference = steps.build(cell)
    checkpoints = steps.train_and_save(
        cell, reference, state=lambda: _model(reference.trained), parts=["model_equal"]
    )
    checks.verify_training(cell, reference)

    target = steps.build_anew(cell)
    for number, checkpoint in enumerate(reversed(checkpoints)):
        before = checks.make_different(cell, target, checkpoint, number)
        steps.load(cell, target, checkpoint, state=_model(target))
        checks.verify_restored(cell, target, checkpoint, before)
        for how, load in checkpoint.checkpointer.other_ways(checkpoint.checkpoint_id).items():
            again = replace(checkpoint, how=f", {how}")
            before = checks.make_different(cell, target, again, number)
            with cell.phase("load", how):
                load(_model(target))
            checks.verify_restored(cell, target, again, before)


def _model(run: TrainingRun) -> dict[str, Any]:
    return {"model": run.state()["model"]}
