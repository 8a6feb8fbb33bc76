"""A resume as a restart: what a user's code keeps anywhere in its process, such as a counter of a module, is
gone when its job is started again. So each stage has processes of its own, and what loads runs under another
interpreter, with another hash seed, than what has saved."""

from collections.abc import Callable

from dcpbench.cell import checkpoint_files, handover, side_effects, steps, uninterrupted
from dcpbench.cell.cell import Cell
from dcpbench.cell.checkpoint import Checkpoint
from dcpbench.cell.steps import Story
from dcpbench.core.state import StatePart
from dcpbench.scenarios import chain, save_load
from dcpbench.verify.perturb import compare_controlled
from dcpbench.verify.snapshot import Leaves
from dcpbench.workloads.run_state import live_state


def never_saves(cell: Cell) -> None:
    """Train the run that never saves, and one that is never restored, for the controls of losses."""
    cell, unsaved = uninterrupted.begin(cell)
    handover.leave(cell, unsaved)


def never_saves_in_chain(cell: Cell) -> None:
    """Train them for a chain.

    Raises:
        Skip: the plan has one save.
    """
    cell, unsaved = chain.begin(cell)
    handover.leave(cell, unsaved)


def save(cell: Cell) -> None:
    """Train the reference run and save it; in a scenario that converts, leave it to another layout."""
    _save_by(uninterrupted.save, cell)


def save_first(cell: Cell) -> None:
    """Train the reference run of a chain and save its first checkpoint."""
    _save_by(chain.save, cell)


def load(cell: Cell) -> None:
    """Load each checkpoint and train on."""
    save_load.load_and_resume(*handover.take(cell))


def follow(cell: Cell) -> None:
    """Resume a chain from its newest checkpoint."""
    cell, saved = handover.take(cell)
    chain.follow(cell, saved)
    handover.leave(cell, saved)


def _save_by(save: Callable[[Cell, Story], Story], cell: Cell) -> None:
    cell, unsaved = handover.take(cell)
    reference = save(cell, unsaved)
    for checkpoint in checkpoint_files.remaining(cell, reference.checkpoints)[-1:]:
        _load_beside(cell, reference, checkpoint)
    handover.leave(cell, reference, any_layout=cell.config.scenario.converts)


def _load_beside(cell: Cell, reference: Story, checkpoint: Checkpoint) -> None:
    """Check that a load changes no tensor of the run that was saved, which only its process shows. It is not
    one of the loads whose time is measured."""
    measured = len(cell.report.measurements)
    target = steps.build_target(cell, reference)

    def tensors() -> Leaves:
        state = live_state(reference.trained)
        return state[StatePart.model] | state[StatePart.optimizer]

    ended = cell.ended[checkpoint.checkpoint_id]
    before = ended[StatePart.model] | ended[StatePart.optimizer]
    cell.saved.clear()  # of the run only tensors are compared here
    steps.load(cell, target, checkpoint)
    with cell.phase("verify", "side_effects"):
        compared = compare_controlled(before, tensors(), proven=cell.proven("side_effect_free"))
        where = f"after the load of step {checkpoint.step}"
        cell.record("side_effect_free", compared, where, side_effects.LOAD)
    own = [one for one in cell.report.measurements[measured:] if (one.phase or "").startswith("verify")]
    cell.report.measurements[measured:] = own
