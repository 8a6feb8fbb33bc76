"""What faults damage: the state of one rank, with methods to reach and to change one part of it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from dcpbench.checkpointers.base import Ranks
from dcpbench.verify.snapshot import (
    TensorLeaf,
    local_part,
    named_parameters,
    persistent_tensors,
    snapshot_model,
    snapshot_optimizer,
)

Tensors = dict[str, torch.Tensor]


@dataclass
class Target:
    """A state that was loaded, or a live one, on one rank.

    Args:
        state: `Stateful` objects by their keys; model and optimizer may be their state dicts.
        ranks: this rank and its peers.
        first: a whole tensor of the cell's first checkpoint by its key.
    """

    state: dict[str, Any]
    ranks: Ranks
    first: Callable[[str], torch.Tensor | None]

    @property
    def victim(self) -> bool:
        """Whether this is the one rank that is damaged: the last but one, so 2 of 4."""
        return self.ranks.rank == max(self.ranks.size - 2, 0)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups with their hyperparameters."""
        held = self.state["optimizer"]
        groups: list[dict[str, Any]] = (
            held["param_groups"] if isinstance(held, dict) else held.optimizer.param_groups
        )
        return groups

    def parameters(self) -> Tensors:
        """This rank's parts of the parameters by FQN."""
        held = self.state["model"]
        named = held if isinstance(held, dict) else named_parameters(held.model)
        return {name: local_part(value) for name, value in named.items()}

    def buffers(self) -> Tensors:
        """The persistent buffers by FQN."""
        held = self.state["model"]
        return held if isinstance(held, dict) else persistent_tensors(held.model)

    def moments(self, entry: str) -> Tensors:
        """This rank's parts of one entry of the optimizer's state by the parameter's FQN."""
        held = self.state["optimizer"]
        if isinstance(held, dict):
            return {name: local_part(entries[entry]) for name, entries in held["state"].items()}
        names = {id(value): name for name, value in named_parameters(held.model).items()}
        return {
            names[id(parameter)]: local_part(entries[entry])
            for parameter, entries in held.optimizer.state.items()
            if entry in entries and local_part(parameter).numel()
        }

    def largest_parameter(self) -> torch.Tensor:
        """The part of a parameter with the most elements: an uneven shard may have none."""
        return max(self.parameters().values(), key=torch.Tensor.numel)

    def largest_moment(self, entry: str) -> torch.Tensor:
        """The largest part of one entry of the optimizer's state that this rank has."""
        return max(self.moments(entry).values(), key=torch.Tensor.numel)

    def flip(self, tensor: torch.Tensor, bit: int) -> None:
        """Flip one bit of the element with the largest magnitude: 0 is one unit in the last place, 31 the
        sign."""
        flat = tensor.view(-1)
        index = int(flat.abs().argmax().item())
        one = torch.tensor(1, dtype=torch.int64, device=flat.device)
        flat.view(torch.int32)[index] ^= one.bitwise_left_shift(bit).to(torch.int32)

    def round_trip(self, tensor: torch.Tensor, dtype: str) -> None:
        """Convert a tensor to a narrower dtype and back."""
        tensor.copy_(tensor.to(getattr(torch, dtype)).to(tensor.dtype))

    def exchange(self, one: torch.Tensor, other: torch.Tensor) -> None:
        """Give two tensors of one shape each other's values."""
        first, second = one.clone(), other.clone()
        one.copy_(second)
        other.copy_(first)

    def draw_again(self, tensor: torch.Tensor) -> None:
        """Give a tensor other random values."""
        tensor.copy_(torch.rand(tensor.shape, generator=torch.Generator().manual_seed(99)))

    def bring_back(self, key: str) -> None:
        """Give this rank's part of a tensor the values that it has in the cell's first checkpoint."""
        model, optimizer = self.state["model"].model, self.state["optimizer"].optimizer
        leaves = {f"model.{name}": leaf for name, leaf in snapshot_model(model).items()}
        leaves |= {f"optimizer.{name}": leaf for name, leaf in snapshot_optimizer(model, optimizer).items()}
        leaf, whole = leaves[key], self.first(key)
        assert isinstance(leaf, TensorLeaf)
        assert whole is not None
        leaf.local.copy_(leaf.extent.take(whole).reshape(leaf.local.shape))

    def exchange_with_last_rank(self, parts: list[torch.Tensor]) -> None:
        """Have rank 0 and the last one put each other's elements into their parts, one part after the other,
        as far as both go; collective."""
        rank, size = self.ranks.rank, self.ranks.size
        everything = torch.cat([part.reshape(-1) for part in parts])
        theirs: list[torch.Tensor] = [everything for _ in range(size)]
        dist.all_gather_object(theirs, everything.cpu(), group=self.ranks.group_of(0))
        partner = {0: size - 1, size - 1: 0}.get(rank)
        if partner is None:
            return
        common = min(everything.numel(), theirs[partner].numel())
        everything[:common] = theirs[partner][:common].to(everything.device)
        for part, values in zip(parts, everything.split([part.numel() for part in parts]), strict=True):
            part.copy_(values.reshape(part.shape))


@dataclass
class StagedState:
    """A copy of all state dicts, as they are saved; `first` is that of the cell's first save."""

    state: dict[str, Any]
    first: dict[str, Any]

    def part(self, *keys: str) -> torch.Tensor:
        """This rank's part of the tensor under these keys, one below the other."""
        held: Any = self.state
        for key in keys:
            held = held[key]
        return local_part(held)
