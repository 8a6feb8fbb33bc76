"""A resume as a restart: what a user's code keeps anywhere in its process, such as a counter of a module, is
gone when its job is started again. So each stage has processes of its own, and what loads runs under another
interpreter, with another hash seed, than what has saved."""

from dataclasses import replace

from dcpbench.cell import checks, handover, side_effects, steps
from dcpbench.cell.cell import Cell
from dcpbench.cell.checkpoint import Checkpoint
from dcpbench.cell.handover import Saved, leave_to_ranks, take_as_rank
from dcpbench.cell.steps import ReferenceRun
from dcpbench.cell.unrestored import with_unrestored
from dcpbench.scenarios import chain, save_load
from dcpbench.verify.perturb import compare_controlled
from dcpbench.verify.snapshot import Leaves
from dcpbench.workloads.run_state import live_state, retained_copy, retained_state


def save(cell: Cell) -> None:
    """Train the reference run and save it."""
    _leave_saved(*save_load.begin(cell))


def save_first(cell: Cell) -> None:
    """Train the reference run of a chain and save its first checkpoint.

    Raises:
        Skip: the plan has one save.
    """
    _leave_saved(*chain.begin(cell))


def never_saves(cell: Cell) -> None:
    """A run that never saves ends in the state of the one that saved."""
    cell, saved = take_as_rank(cell)
    run = checks.train_without_saves(cell, saved.record)
    last = saved.record.states[len(saved.record.losses)]
    checks.compare_without_saves(cell, retained_state(run), last, saved.record.judged)
    leave_to_ranks(cell, saved)


def unrestored(cell: Cell) -> None:
    """Train runs that are never restored, for the controls of losses; in a scenario that converts, leave
    everything to another layout."""
    cell, saved = take_as_rank(cell)
    record = with_unrestored(cell, saved.record)
    if cell.config.scenario.converts:
        handover.hand_over(cell, saved.checkpoints, record)
    else:
        leave_to_ranks(cell, replace(saved, record=record))


def load(cell: Cell) -> None:
    """Load each checkpoint and train on."""
    save_load.load_and_resume(*take_as_rank(cell))


def follow(cell: Cell) -> None:
    """Resume a chain from its newest checkpoint."""
    cell, saved = take_as_rank(cell)
    chain.follow(cell, saved)
    leave_to_ranks(cell, saved)


def _leave_saved(cell: Cell, reference: ReferenceRun, saved: Saved) -> None:
    _load_beside(cell, reference, saved.checkpoints[-1])
    leave_to_ranks(cell, saved)


def _load_beside(cell: Cell, reference: ReferenceRun, checkpoint: Checkpoint) -> None:
    """Check that a load changes no tensor of the run that was saved, which only its process shows. It is not
    one of the loads whose time is measured."""
    measured = len(cell.report.measurements)
    target = steps.build_target(cell, reference.record)

    def tensors() -> Leaves:
        state = live_state(reference.trained)
        return state["model_equal"] | state["optim_equal"]

    with cell.phase("verify", "side_effects"):
        before = retained_copy({"": tensors()})[""]
    steps.load(cell, target, replace(checkpoint, source=None))
    with cell.phase("verify", "side_effects"):
        compared = compare_controlled(before, tensors(), proven=cell.proven("side_effect_free"))
        where = f"after the load of step {checkpoint.step}"
        cell.record("side_effect_free", compared, where, side_effects.LOAD)
    own = [one for one in cell.report.measurements[measured:] if (one.phase or "").startswith("verify")]
    cell.report.measurements[measured:] = own
