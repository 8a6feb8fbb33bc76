"""Defects planted on purpose right after a load: a row whose fault goes unseen is a fault of ours.

Each takes the trainee that was restored (its `model`, `optimizer`, `tensor_object`, `train_state`)
and the number of this rank, and damages the live state in place, on one rank where it can: what is
seen on rank 0 alone is no proof.
"""

from typing import Protocol

import torch
from torch import nn

from dcpbench.verify.snapshot import local_part, named_parameters

_VICTIM_OF_FOUR = 2


class Restored(Protocol):
    """The part of a trainee that faults are planted in."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    tensor_object: "HasData"


class HasData(Protocol):
    """A stateful object that holds a tensor."""

    data: torch.Tensor


@torch.no_grad()
def weight_lowest_bit(restored: Restored, rank: int, victim: int = _VICTIM_OF_FOUR) -> None:
    """One unit in the last place of one weight, on one rank."""
    if rank == victim:
        _flip_lowest_bit(_largest(named_parameters(restored.model)))


@torch.no_grad()
def exp_avg_lowest_bit(restored: Restored, rank: int, victim: int = _VICTIM_OF_FOUR) -> None:
    """One unit in the last place of one element of Adam's first moment, on one rank."""
    if rank == victim:
        moments = {
            str(number): entries["exp_avg"]
            for number, entries in enumerate(restored.optimizer.state.values())
        }
        _flip_lowest_bit(_largest(moments))


@torch.no_grad()
def step_off_by_one(restored: Restored, rank: int, victim: int = _VICTIM_OF_FOUR) -> None:
    """One parameter's step counter, on one rank."""
    if rank == victim:
        next(iter(restored.optimizer.state.values()))["step"].add_(1)


def lr_not_restored(restored: Restored, rank: int) -> None:
    """The learning rate of the first group is another one."""
    restored.optimizer.param_groups[0]["lr"] *= 2


@torch.no_grad()
def object_zeroed(restored: Restored, rank: int) -> None:
    """The stateful object's tensor is empty of what was saved."""
    restored.tensor_object.data.zero_()


def _largest(tensors: dict[str, torch.Tensor] | dict[str, nn.Parameter]) -> torch.Tensor:
    """The local part with the most elements: an uneven shard may be empty on the victim."""
    return max((local_part(value) for value in tensors.values()), key=torch.Tensor.numel)


def _flip_lowest_bit(tensor: torch.Tensor) -> None:
    index = int(tensor.abs().reshape(-1).argmax().item())
    flat = tensor.view(-1) if tensor.is_contiguous() else tensor.reshape(-1)
    flat.view(torch.int32)[index] ^= 1
