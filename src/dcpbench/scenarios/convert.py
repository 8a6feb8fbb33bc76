"""Save under one parallelism and load under another, on any number of ranks: the layout of the run that saved
does not matter."""

from dcpbench.cell import checks, steps
from dcpbench.cell.cell import Cell
from dcpbench.cell.steps import ReferenceRun


def resume_converted(cell: Cell, saved: ReferenceRun) -> None:
    """Load under `load_parallel` on `load_world_size` ranks. The restored state has equal content; training
    is close, or exact if parallelism, ranks and torch are the same."""
    target = steps.build_target(cell, saved)
    for number, checkpoint in enumerate(reversed(saved.checkpoints)):
        checks.load_and_verify(cell, target, checkpoint, number)
        checks.resume(cell, target, checkpoint, saved)
