"""Save under one parallelism, load under another, on as many ranks as one likes: what a checkpoint holds
does not depend on how it lay."""

import torch

from dcpbench.cell import checks, handover, steps
from dcpbench.cell.cell import Cell


def train_and_save(cell: Cell) -> None:
    """The first stage: what `parallel` saves on `world_size` ranks."""
    reference = steps.build(cell)
    checkpoints = steps.train_and_save(cell, reference)
    checks.verify_training(cell, reference)
    handover.hand_over(cell, checkpoints, reference.losses)


def load_and_resume(cell: Cell) -> None:
    """The second stage: `load_parallel` loads it on `load_world_size` ranks, equal by content, and training
    goes on closely; exactly where parallelism, ranks and torch are the same."""
    config = cell.config
    same_layout = config.loading == config.parallel and cell.world.size == config.world_size
    loading = cell.vary(parallel=config.loading, world_size=cell.world.size)
    checkpoints, losses = handover.take_over(loading, steps.open_checkpointer(loading), same_layout)
    target = steps.build_anew(loading)
    target.keeps_random = same_layout
    exactly = same_layout and losses.torch_version == torch.__version__
    for number, checkpoint in enumerate(reversed(checkpoints)):
        checks.load_and_verify(loading, target, checkpoint, number)
        checks.resume(loading, target, checkpoint, losses, exactly)
