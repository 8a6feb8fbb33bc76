"""Train and save, several times, and go on; then, for every checkpoint, build everything anew, load,
compare, and train on as if nothing had happened."""

from dcpbench.scenarios import checks, steps
from dcpbench.scenarios.cell import Cell


def save_load(cell: Cell) -> None:
    """What was saved comes back bit for bit, and training goes on with the losses it would have had."""
    oracle = steps.build(cell)
    checkpoints = steps.train_and_save(cell, oracle)
    checks.verify_twin(cell, oracle)
    checks.verify_save_harmless(cell, oracle)

    # The newest first: it is the one that meets a model nothing was ever loaded into.
    target = steps.build_anew(cell)
    for number, checkpoint in enumerate(reversed(checkpoints)):
        checks.load_and_verify(cell, target, checkpoint, number)
        if number == 0:  # loading twice is loading once, and so is setting what is there
            steps.load(cell, target, checkpoint)
            checks.verify_restored(cell, target, checkpoint)
            steps.set_again(cell, target)
            checks.verify_restored(cell, target, checkpoint)
        checks.resume(cell, target, checkpoint, oracle.losses, number)
