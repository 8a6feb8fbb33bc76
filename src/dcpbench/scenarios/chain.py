"""Save, load into a new run, train and save again, and so on: what a resumed run saves is as good as the
checkpoint that it was resumed from."""

from dataclasses import replace

from dcpbench.cell import checks, handover, steps
from dcpbench.cell.cell import Cell
from dcpbench.core.rank_report import Skip


def chain(cell: Cell) -> None:
    """Each run but the first is restored from what the one before has saved, and ends in the states of the
    reference run. Like a job that dies, it takes a few steps after its save, which may be in flight.

    Raises:
        Skip: the plan has one save.
    """
    plan = cell.config.save_steps
    if len(plan) < 2:
        raise Skip(f"saves={cell.config.saves}: a chain has at least two checkpoints")
    reference = replace(steps.build(cell), ends=frozenset(plan[1:]))
    checkpoints = steps.train_and_save(cell, reference, at=plan[:1])
    checks.verify_training(cell, reference)
    for number, step in enumerate([*plan[1:], None]):
        saved = checkpoints[-1]
        run = steps.build_target(cell, number, saved.step)
        run.random.kept, run.judged = reference.trained.random.kept, reference.record.judged
        checks.load_and_verify(cell, run, saved, number)
        checks.resume(cell, run, saved, reference.record, until=step)
        if step is not None:
            checkpoints.append(steps.save(cell, run, saved.checkpointer))
            not_loaded = replace(checkpoints[-1], how=", without a load")
            checks.resume(cell, run, not_loaded, reference.record)
            steps.finish(cell, checkpoints[-1])
    if cell.config.own_trainer:
        handover.leave_to_trainer(cell, checkpoints[-1], reference.trained, reference.record)
