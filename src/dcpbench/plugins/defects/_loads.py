"""Loads that are repeated, into runs that differ from a load target in one thing."""

from dataclasses import replace

from dcpbench.cell.cell import Cell
from dcpbench.cell.explained import Resumed
from dcpbench.workloads import build_run
from dcpbench.workloads.run_state import FLAGS, RANDOM, live_state
from dcpbench.workloads.training_run import TrainingRun


def new_target(cell: Cell) -> TrainingRun:
    """Build a load target."""
    return build_run.build(cell.config, cell.world, cell.config.seed + 1, cell.config.load_into.scheduler)


def load_again(cell: Cell, reference: Resumed, steps: int = 0) -> TrainingRun:
    """Load the checkpoint into a new run that has taken this number of steps."""
    checkpoint, run = reference.checkpoint, new_target(cell)
    run.train(reference.data, steps)
    run.component.prepare(run.model, checkpoint.step)
    if cell.config.load_into.filled:
        run.fill_optimizer()
    run.keeps_random = frozenset(name.split(".", 2)[-1] for name in checkpoint.state.get(RANDOM, {}))
    checkpoint.checkpointer.load(run.state(), checkpoint.checkpoint_id)
    run.is_at(checkpoint.step)
    return run


def resumes_exactly(cell: Cell, run: TrainingRun, reference: Resumed) -> bool:
    """Train a run on; return whether it ends in the state of the uninterrupted run on all ranks."""
    run.train(reference.data, reference.until)
    live, expected = live_state(run), replace(reference.checkpoint, state=reference.expected)
    parts = [check for check in live if check != FLAGS]
    wrong = [expected.compare(check, live[check], cell.world.group, closely=False) for check in parts]
    return not any(cell.world.gathered(any(wrong)))
