"""Save, load into a new run, train and save again, and so on: what a resumed run saves is as good as the
checkpoint that it was resumed from. Like a job that dies, each run takes a few steps after its save, which
may be in flight."""

from dataclasses import replace

from dcpbench.cell import checks, steps, uninterrupted
from dcpbench.cell.cell import Cell
from dcpbench.cell.steps import ReferenceRun
from dcpbench.core.rank_report import Skip


def begin_chain(cell: Cell) -> tuple[Cell, ReferenceRun]:
    """Train the run that never saves; return the cell with its steps, and the record of that run.

    Raises:
        Skip: the plan has one save.
    """
    if len(cell.config.save_steps) < 2:
        raise Skip(f"saves={cell.config.saves}: a chain has at least two checkpoints")
    return uninterrupted.train_unsaved(cell, exactly=True)


def save_first_checkpoint(cell: Cell, unsaved: ReferenceRun) -> tuple[Cell, ReferenceRun]:
    """Train the reference run, and save the first checkpoint; it ends in the state of the run that never
    saves."""
    plan = cell.window.saves
    reference = replace(steps.build_reference(cell, unsaved), extra_ends=tuple(plan[1:]))
    steps.train_and_save(cell, reference, at=plan[:1])
    uninterrupted.compare_final_states(cell, unsaved, reference)
    return cell, reference


def resume_and_save(cell: Cell, saved: ReferenceRun) -> tuple[Cell, ReferenceRun]:
    """Resume from the newest checkpoint; if the plan has a later save, save there, and train on. Each run
    ends in the states of the reference run."""
    number, checkpoint = len(saved.checkpoints) - 1, saved.checkpoints[-1]
    later = cell.window.saves[number + 1 :]
    run = steps.build_target(cell, saved, number, checkpoint.step)
    checks.load_and_verify(cell, run, checkpoint, number)
    checks.resume(cell, run, checkpoint, saved, until=later[0] if later else None)
    if later and run.train_state.step == later[0]:  # a trainer can end before
        again = steps.save(cell, run)
        checks.resume(cell, run, replace(again.checkpoint, how=", without a load"), saved)
        saved.checkpoints.append(steps.finish(cell, again))
    return cell, saved
