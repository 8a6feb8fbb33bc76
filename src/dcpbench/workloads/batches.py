"""The data of a cell."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from dcpbench.config.schema import SEED_STRIDE, Config
from dcpbench.workloads.workload import Tensors, each_tensor, workload_of


@dataclass(frozen=True)
class Batches:
    """The global batches of a cell: a function of the seed and the step, on whatever layout they are trained.

    They are drawn on the CPU by a generator of their own, so that neither the device nor what else
    was drawn before has a say in them.
    """

    seed: int
    draw: Callable[[torch.Generator], Tensors]
    device: torch.device

    def at(self, step: int) -> Tensors:
        """The batch of a step, counted from 1."""
        generator = torch.Generator().manual_seed(self.seed * SEED_STRIDE + step)
        return each_tensor(lambda tensor: tensor.to(self.device), self.draw(generator))


def batches_of(config: Config, device: torch.device) -> Batches:
    """The data of a cell; its workload, of which nothing else is needed here, says what it is."""
    if config.own_trainer:
        return Batches(config.seed, lambda _: None, device)
    # One's own may hold tensors that its batches are made of.
    with device if config.workload.target else torch.device("meta"):
        return Batches(config.seed, workload_of(config).batch, device)
