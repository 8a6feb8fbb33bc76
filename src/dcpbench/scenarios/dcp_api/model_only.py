"""Save the model alone, as it is published, and load it into a new model: by the cell's checkpointer, and by
every other way that reads its files."""

from dataclasses import replace
from typing import Any

from dcpbench.cell import checks, steps, uninterrupted
from dcpbench.cell.cell import Cell
from dcpbench.core.state import StatePart
from dcpbench.runs.run import Run


def model_only(cell: Cell) -> None:
    """The model is restored bit for bit, and its checkpoint contains nothing else."""
    reference = uninterrupted.train_and_save_reference(cell, state=_model, parts=[StatePart.model])
    target = steps.build_target(cell, reference)
    for number, checkpoint in enumerate(reversed(reference.checkpoints)):
        before = checks.perturb_target(cell, target, checkpoint, number)
        steps.load(cell, target, checkpoint, state=_model(target))
        checks.verify_restored(cell, target, checkpoint, before)
        for how, load in cell.checkpointer.other_ways(checkpoint.checkpoint_id).items():
            again = replace(checkpoint, how=f", {how}")
            before = checks.perturb_target(cell, target, again, number)
            with cell.phase("load", how):
                load(_model(target))
            checks.verify_restored(cell, target, again, before)


def _model(run: Run) -> dict[str, Any]:
    return {"model": run.state()["model"]}
