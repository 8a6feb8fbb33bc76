"""Loads that a defect has affected, and loads that are repeated."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from dcpbench.cell.cell import Cell
from dcpbench.cell.checkpoint import Checkpoint
from dcpbench.cell.explained import Resumed
from dcpbench.core.mismatch import Mismatch
from dcpbench.core.rank_report import CheckReport
from dcpbench.plugins.defects._cells import fsdp1_sizes
from dcpbench.plugins.defects._other_run import as_resumed
from dcpbench.verify.snapshot import TensorLeaf
from dcpbench.workloads import build_run
from dcpbench.workloads.run_state import FLAGS, State, live_state
from dcpbench.workloads.training_run import TrainingRun


def explained(cell: Cell, check: str, checkpoint: Checkpoint | None = None) -> list[Mismatch]:
    """Return the mismatches of this rank that a defect explains, after a load of a checkpoint or of any."""
    found = cell.report.checks.get(check, CheckReport()).distinct.values()
    return [one for one in found if one.by and (checkpoint is None or one.where == str(checkpoint))]


def names_by(cell: Cell, check: str, by: str, checkpoint: Checkpoint | None = None) -> set[str]:
    """Return the names of the mismatches that one defect explains, as `explained`."""
    return {one.name for one in explained(cell, check, checkpoint) if one.by == by}


def happened(cell: Cell, check: str, by: str, checkpoint: Checkpoint) -> bool:
    """Return whether a defect explains a mismatch of a checkpoint on any rank; collective."""
    return any(cell.world.gathered(bool(names_by(cell, check, by, checkpoint))))


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
    run.random.kept, run.judged = reference.run.random.kept, reference.run.judged
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


def exact_with(cell: Cell, reference: Resumed, mend: Callable[[TrainingRun], None]) -> Iterator[State]:
    """Yield the states `as_loaded` if a load that is followed by `mend` resumes exactly, so that nothing else
    is wrong; collective."""
    exact = load_again(cell, reference)
    with torch.no_grad():
        mend(exact)
    if resumes_exactly(cell, exact, reference):
        yield from as_loaded(cell, reference)


def as_loaded(cell: Cell, reference: Resumed) -> Iterator[State]:
    """Load and train on: as loaded and, under FSDP1, as set again. Yield both states."""
    for again in (False, True) if fsdp1_sizes(cell.config) else (False,):
        run = load_again(cell, reference)
        if again:
            run.set_again()
        run.train(reference.data, reference.until)
        yield as_resumed(cell, reference, live_state(run))


def exact_with_saved(cell: Cell, reference: Resumed, check: str, by: str) -> Iterator[State]:
    """Yield the state of a run that trains on as loaded, if the values make it exact that were saved of
    what a defect changes in the load; collective.

    Args:
        check, by: found this defect after the load.
    """
    saved = reference.checkpoint.state.get(check, {})
    wrong = names_by(cell, check, by, reference.checkpoint)
    copied = all(isinstance(saved.get(name), TensorLeaf) for name in wrong)
    everywhere = cell.world.gathered((bool(wrong), copied))
    if not any(some for some, _ in everywhere) or not all(copied for _, copied in everywhere):
        return

    def mend(run: TrainingRun) -> None:
        for name, leaf in live_state(run)[check].items():
            if name in wrong:
                leaf.local.copy_(saved[name].local)

    yield from exact_with(cell, reference, mend)
