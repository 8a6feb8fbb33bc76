"""Give a run the saved values of what known defects of torch made wrong in a load. A resume then differs from
the uninterrupted run only because of something else."""

import torch

from dcpbench.cell.cell import Cell
from dcpbench.cell.checkpoint import Checkpoint
from dcpbench.core.state import CHECK_OF, StatePart, named
from dcpbench.workloads.run import Run
from dcpbench.workloads.run_state import live_state
from dcpbench.workloads.saved_values import set_saved


def explained_names(cell: Cell, part: StatePart, checkpoint: Checkpoint | None = None) -> dict[str, str]:
    """Return the names of a part that known defects alone made wrong on this rank, each with the defect, in a
    load of a checkpoint or in any load."""
    report = cell.report.checks.get(CHECK_OF[part])
    every = [*report.distinct.values()] if report else []
    mismatches = [one for one in every if checkpoint is None or one.where == str(checkpoint)]
    unexplained = {one.name for one in mismatches if not one.by}
    return {one.name: one.by for one in mismatches if one.by and one.name not in unexplained}


def mend(cell: Cell, target: Run, checkpoint: Checkpoint) -> str | None:
    """Give a run that has loaded a checkpoint the saved values of exactly what known defects made wrong.
    Return why that is not possible, if it is not; collective."""
    parts = [part for part in checkpoint.state if part is not StatePart.flags]
    wrong = {part: explained_names(cell, part, checkpoint) for part in parts}
    if not any(cell.world.gathered(any(wrong.values()))):
        return None
    before = live_state(target)
    with torch.no_grad():
        for part, names in wrong.items():
            leaves = checkpoint.state[part]
            if wrong_names := named(leaves | before.get(part, {}), names):
                recall = checkpoint.recall_of(part, cell.checkpointer)
                set_saved(target, part, wrong_names, leaves, recall)
    live, left = live_state(target), []
    for part in (part for part in parts if part in live):
        mismatches = checkpoint.compare(checkpoint.state[part], live[part], cell.world.group, closely=False)
        left += [(one.name, wrong[part][one.name]) for one in mismatches if one.name in wrong[part]]
    first = next((of_rank[0] for of_rank in cell.world.gathered(left) if of_rank), None)
    return first and f"{first[0]} was not restored ({first[1]}), and its saved value cannot be set"
