"""Save, load into a new run, train and save again, and so on: what a resumed run saves is as good as the
checkpoint that it was resumed from."""

from dataclasses import replace

from dcpbench.cell import checks, steps
from dcpbench.cell.cell import Cell
from dcpbench.cell.handover import Saved
from dcpbench.cell.pace import with_steps
from dcpbench.cell.steps import ReferenceRun
from dcpbench.core.rank_report import Skip


def chain(cell: Cell) -> None:
    """Each run but the first is restored from what the one before has saved, and ends in the states of the
    reference run. Like a job that dies, it takes a few steps after its save, which may be in flight.

    Raises:
        Skip: the plan has one save.
    """
    cell, reference, saved = begin(cell)
    checks.verify_training(cell, reference)
    for _ in cell.config.save_steps:
        follow(cell, saved)


def begin(cell: Cell) -> tuple[Cell, ReferenceRun, Saved]:
    """Train the reference run, and save the first checkpoint; return the cell with its numbers of steps.

    Raises:
        Skip: the plan has one save.
    """
    if len(cell.config.save_steps) < 2:
        raise Skip(f"saves={cell.config.saves}: a chain has at least two checkpoints")
    reference = steps.build(cell)
    cell = with_steps(cell, reference)
    plan = cell.config.save_steps
    reference = replace(reference, ends=frozenset(plan[1:]))
    checkpoints = steps.train_and_save(cell, reference, at=plan[:1])
    return cell, reference, Saved([*checkpoints], reference.record)


def follow(cell: Cell, saved: Saved) -> None:
    """Resume from the newest checkpoint; if the plan has a later save, save there, and train on."""
    number, checkpoint = len(saved.checkpoints) - 1, saved.checkpoints[-1]
    later = cell.config.save_steps[number + 1 :]
    run = steps.build_target(cell, saved.record, number, checkpoint.step)
    checks.load_and_verify(cell, run, checkpoint, number)
    checks.resume(cell, run, checkpoint, saved.record, until=later[0] if later else None)
    if later:
        again = steps.save(cell, run, checkpoint.checkpointer)
        checks.resume(cell, run, replace(again, how=", without a load"), saved.record)
        steps.finish(cell, again)
        saved.checkpoints.append(again)
