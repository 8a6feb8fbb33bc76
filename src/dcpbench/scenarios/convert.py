"""Save under one parallelism, load under another: what a checkpoint holds does not depend on how it lay."""

from dcpbench.scenarios import checks, steps
from dcpbench.scenarios.cell import Cell


def convert(cell: Cell) -> None:
    """What `parallel` saved, `load_parallel` loads: equal by content, and training goes on closely."""
    oracle = steps.build(cell)
    checkpoints = steps.train_and_save(cell, oracle)
    checks.verify_twin(cell, oracle)

    other = cell.vary(parallel=cell.config.loading)
    same_layout = other.config.parallel == cell.config.parallel
    target = steps.build_anew(other)
    for number, checkpoint in enumerate(reversed(checkpoints)):
        steps.make_different(other, target, number)
        checks.prove_power(other, target, checkpoint, same_layout=same_layout)
        steps.load(other, target, checkpoint)
        checks.verify_restored(other, target, checkpoint, same_layout=same_layout)
        until = checkpoint.step + cell.plan.resume_steps
        resumed = steps.train(other, target, oracle.data, until)
        checks.verify_resumed(other, target, resumed, checkpoint, oracle, number, same_layout)
