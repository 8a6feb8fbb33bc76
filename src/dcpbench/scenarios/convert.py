"""Save under one parallelism and load under another, on any number of ranks: the layout of the run that saved
does not matter."""

import torch

from dcpbench.cell import checks, handover, steps, uninterrupted
from dcpbench.cell.cell import Cell


def train_and_save(cell: Cell) -> None:
    """First stage: save under `parallel` on `world_size` ranks."""
    handover.leave(cell, uninterrupted.train_and_save(cell), any_layout=True)


def load_and_resume(cell: Cell) -> None:
    """Second stage: load under `load_parallel` on `load_world_size` ranks. The restored state has equal
    content; training is close, or exact if parallelism, ranks and torch are the same."""
    config = cell.config
    same_layout = config.loading == config.parallel and cell.world.size == config.world_size
    loading = cell.vary(parallel=config.loading, world_size=cell.world.size)
    loading, story = handover.take(loading, any_layout=True, same_layout=same_layout)
    target = steps.build_target(loading, story)
    exactly = same_layout and story.torch_version == torch.__version__
    for number, checkpoint in enumerate(reversed(story.checkpoints)):
        checks.load_and_verify(loading, target, checkpoint, number)
        checks.resume(loading, target, checkpoint, story, exactly)
