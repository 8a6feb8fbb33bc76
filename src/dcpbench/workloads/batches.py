"""The data: a batch is a function of the seed and the step, on whatever layout it is trained."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Batches:
    """The global batches of a cell: `size` samples each.

    They are drawn on the CPU by a generator of their own, so that neither the device nor what else
    was drawn before has a say in them. Targets lie in [1, 2): away from zero, so that the loss is.
    """

    seed: int
    size: int
    input_size: int
    output_size: int
    device: torch.device

    def at(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs of shape (size, input_size) and targets of shape (size, output_size)."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        inputs = torch.rand(self.size, self.input_size, generator=generator)
        targets = 1 + torch.rand(self.size, self.output_size, generator=generator)
        return inputs.to(self.device), targets.to(self.device)


@dataclass(frozen=True)
class Share:
    """Which part of a global batch a rank sees; all data-parallel ranks see parts of one size."""

    dp_rank: int = 0
    dp_degree: int = 1

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's rows."""
        return tensor.chunk(self.dp_degree)[self.dp_rank]
