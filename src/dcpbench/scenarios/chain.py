"""Train and save; build anew, load, train on and save; and so on from each of these saves: what a resumed run
saves is as good as what it was resumed from."""

from dataclasses import replace

from dcpbench.cell import checks, handover, steps
from dcpbench.cell.cell import Cell
from dcpbench.core.rank_report import Skip


def chain(cell: Cell) -> None:
    """Every run but the first is restored bit for bit from what the one before has saved, and comes, by the
    losses of the run that was never interrupted, to its state: where it saves, after that, and at the end.
    Like a job that dies, each takes a few steps more than are saved, while its save may be under way.

    Raises:
        Skip: one run alone saves.
    """
    plan = cell.config.save_steps
    if len(plan) < 2:
        raise Skip(f"saves={cell.config.saves}: a chain has at least two checkpoints")
    reference = replace(steps.build(cell), ends=frozenset(plan[1:]))
    checkpoints = steps.train_and_save(cell, reference, at=plan[:1])
    checks.verify_training(cell, reference)
    for number, step in enumerate([*plan[1:], None]):
        saved = checkpoints[-1]
        run = steps.build_anew(cell, number, saved.step)
        run.keeps_random = reference.trained.keeps_random
        checks.load_and_verify(cell, run, saved, number)
        checks.resume(cell, run, saved, reference.losses, until=step)
        if step is not None:
            checkpoints.append(steps.save(cell, run, saved.checkpointer))
            going_on = replace(checkpoints[-1], how=", without a load")
            checks.resume(cell, run, going_on, reference.losses)
            steps.finish(cell, checkpoints[-1])
    if cell.config.own_trainer:
        handover.leave_to_trainer(cell, checkpoints[-1], reference.trained, reference.losses)
