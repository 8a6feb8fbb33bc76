"""Save over a checkpoint of other ranks, whose files may remain among the new ones."""

from dcpbench.cell import checks, steps, uninterrupted
from dcpbench.cell.cell import Cell

_NAME = "checkpoint"


def save_first(cell: Cell) -> None:
    """First stage: save under `parallel` on `world_size` ranks."""
    reference = steps.build_reference(cell)
    steps.train_reference(cell, reference, until=cell.config.steps_before_save)
    steps.finish(cell, steps.save(cell, reference.live_run, _NAME))
    cell.files.clear()  # they are overwritten


def save_over_it(cell: Cell) -> None:
    """Second stage: save another run over it under `load_parallel` on `load_world_size` ranks. A load
    restores that run. Files of the first save may remain, as long as no load reads them."""
    config = cell.config
    overwriting = cell.vary(
        parallel=config.loading,
        world_size=cell.world.size,
        seed=steps.other_seed(cell, 1),
        saves=1,
        save_at=None,
    )
    overwriting, unsaved = uninterrupted.train_unsaved(overwriting)
    reference = steps.build_reference(overwriting, unsaved)
    steps.train_reference(overwriting, reference, until=config.steps_before_save)
    in_flight = steps.save(overwriting, reference.live_run, _NAME)
    in_flight.pending.wait()
    saved = in_flight.checkpoint
    steps.train_reference(overwriting, reference, until=overwriting.config.last_step)
    steps.decide_compared_state(overwriting, reference, [saved])
    uninterrupted.compare_final_states(overwriting, unsaved, reference)

    target = steps.build_target(overwriting, reference)
    checks.load_and_verify(overwriting, target, saved)
    checks.resume(overwriting, target, saved, reference)
