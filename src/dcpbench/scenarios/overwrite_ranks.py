"""Save into a place where other ranks have saved before: files of that save may stay beside the new ones."""

from dcpbench.cell import checks, steps
from dcpbench.cell.cell import Cell

_NAME = "checkpoint"


def save_first(cell: Cell) -> None:
    """The first stage: what `parallel` saves on `world_size` ranks, to be overwritten."""
    reference = steps.build(cell)
    steps.go_on(cell, reference, until=cell.config.train_steps)
    steps.finish(cell, steps.save(cell, reference.trained, steps.open_checkpointer(cell), _NAME))
    cell.files.clear()  # they need not stay what they are
    cell.complete.clear()


def save_over_it(cell: Cell) -> None:
    """The second stage: what `load_parallel` saves over it on `load_world_size` ranks, of another run, comes
    back and nothing of the first. Files that are left of that are no harm as long as nobody reads them."""
    config = cell.config
    other = cell.vary(
        parallel=config.loading,
        world_size=cell.world.size,
        seed=steps.other_seed(cell, 1),
        saves=1,
        save_at=None,
    )
    reference = steps.build(other)
    steps.go_on(other, reference, until=config.train_steps)
    saved = steps.save(other, reference.trained, steps.open_checkpointer(other), _NAME)
    saved.pending.wait()
    steps.go_on(other, reference, until=other.config.last_step)
    checks.verify_training(other, reference)

    target = steps.build_anew(other)
    checks.load_and_verify(other, target, saved)
    checks.resume(other, target, saved, reference.losses)
