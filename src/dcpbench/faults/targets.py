"""Where a fault is planted: what a restored or a live trainee has, and how to reach one part of it."""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dcpbench.verify.snapshot import Leaves, local_part, named_parameters, persistent_tensors


@dataclass
class Site:
    """The live state on one rank; `earlier` is what this rank's model and optimizer were at an earlier
    checkpoint, by the names of a snapshot, and empty if there was none."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any
    noise: Any
    tensor_object: Any
    train_state: Any
    rank: int
    world_size: int
    group: dist.ProcessGroup | None
    earlier: Leaves = field(default_factory=dict)

    @property
    def victim(self) -> bool:
        """Whether this is the one rank that is damaged: the last but one, so 2 of 4."""
        return self.rank == max(self.world_size - 2, 0)

    def parameters(self) -> dict[str, torch.Tensor]:
        """This rank's parts of the parameters by FQN."""
        return {name: local_part(value) for name, value in named_parameters(self.model).items()}

    def buffers(self) -> dict[str, torch.Tensor]:
        """The persistent buffers by FQN."""
        names = named_parameters(self.model).keys()
        return {name: value for name, value in persistent_tensors(self.model).items() if name not in names}

    def moments(self, entry: str) -> dict[str, torch.Tensor]:
        """This rank's parts of one entry of the optimizer's state by the parameter's FQN."""
        names = {id(value): name for name, value in named_parameters(self.model).items()}
        return {
            names[id(parameter)]: local_part(entries[entry])
            for parameter, entries in self.optimizer.state.items()
            if entry in entries and local_part(parameter).numel()
        }


def largest(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """The part with the most elements: an uneven shard may have none."""
    return max(tensors.values(), key=torch.Tensor.numel)


def flip(tensor: torch.Tensor, bit: int) -> None:
    """Flip one bit of the element with the largest magnitude."""
    flat = tensor.view(-1)
    index = int(flat.abs().argmax().item())
    as_bits = flat.view(torch.int32)
    as_bits[index] ^= (
        torch.tensor(1, dtype=torch.int64, device=flat.device).bitwise_left_shift(bit).to(torch.int32)
    )
