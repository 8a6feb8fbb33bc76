"""What faults damage: the state of one rank, with methods to reach and to change one part of it."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from dcpbench.checkpointers.base import Checkpointer, Ranks
from dcpbench.core.rank_report import NothingToInjectError
from dcpbench.verify.perturb import perturbed
from dcpbench.verify.snapshot import (
    TensorLeaf,
    has_extra_state,
    snapshot_model,
    snapshot_nested,
    snapshot_optimizer,
)

Found = TypeVar("Found")


@dataclass
class Target:
    """A state on one rank that was loaded, is live or about to be saved; and its checkpoint.

    Args:
        state: `Stateful` objects or their state dicts by their keys; of files none.
        ranks: this rank and its peers.
        folder: the checkpoint.
        first: the cell's first checkpoint; of a later stage, the first that lies there.
        checkpointer: what saves and loads it.
        kept: what a fault keeps from one save to the next.
    """

    state: dict[str, Any]
    ranks: Ranks
    folder: Path
    first: Path
    checkpointer: Checkpointer
    kept: dict[str, Any]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups with their hyperparameters."""
        held = self.state["optimizer"]
        groups: list[dict[str, Any]] = (
            held["param_groups"] if isinstance(held, dict) else held.optimizer.param_groups
        )
        return groups

    def parts(self, key: str) -> dict[str, TensorLeaf]:
        """This rank's parts of the tensors whose flattened keys match a pattern (`model.*.bias`) by these,
        the largest first: of an uneven shard some may have no elements."""
        name, pattern = key.split(".", 1)
        held = self.state[name]
        if isinstance(held, dict):
            leaves = snapshot_nested(held)
        elif name in ("model", "ema"):
            leaves = snapshot_model(held.model)
        elif name == "optimizer":
            leaves = snapshot_optimizer(held.model, held.optimizer)
        else:
            leaves = snapshot_nested(held.state_dict())
        found = [
            (f"{name}.{below}", leaf)
            for below, leaf in leaves.items()
            if isinstance(leaf, TensorLeaf) and fnmatchcase(below, pattern)
        ]
        return dict(sorted(found, key=lambda item: item[1].local.numel(), reverse=True))

    def largest(self, key: str) -> torch.Tensor:
        """The elements of the largest of these parts, in one dimension."""
        return self.one_of(leaf.local.view(-1) for leaf in self.parts(key).values())

    def parameters(self) -> dict[str, TensorLeaf]:
        """This rank's parts of the model's parameters, as `parts`."""
        return {name: leaf for name, leaf in self.parts("model.*").items() if leaf.kind == "param"}

    def forget_extra_state(self) -> None:
        """Give the first module that has extra state another one."""
        modules = self.state["model"].model.modules()
        module = self.one_of(one for one in modules if has_extra_state(one))
        module.set_extra_state(perturbed(module.get_extra_state()))

    def one_of(self, found: Iterable[Found]) -> Found:
        """The first of what was found; NothingToInjectError if that is nothing."""
        for one in found:
            return one
        raise NothingToInjectError("there is nothing in which it could be planted")

    def put(self, part: torch.Tensor, values: torch.Tensor) -> None:
        """Change a part to these values; NothingToInjectError if it has elements and has these values."""
        before = part.clone()
        part.copy_(values)
        if part.numel() and _bytes(part).equal(_bytes(before)):
            raise NothingToInjectError("it would change nothing there")

    def flip(self, flat: torch.Tensor, bit: int) -> None:
        """Flip one bit of the element with the largest magnitude. Bits are those of float32 (0 is one unit in
        the last place, 31 the sign); those in between are the lowest one of the exponent in other dtypes."""
        if not flat.numel():
            raise NothingToInjectError("this rank has no elements")
        whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
        if flat.dtype != torch.float32 and bit:
            lowest = round(-math.log2(torch.finfo(flat.dtype).eps))
            bit = flat.element_size() * 8 - 1 if bit == 31 else lowest
        index = int(flat.abs().argmax().item())
        one = torch.tensor(1, dtype=torch.int64, device=flat.device)
        flat.view(whole)[index] ^= one.bitwise_left_shift(bit).to(whole)

    def draw_again(self, tensor: torch.Tensor) -> None:
        """Give a tensor other random values."""
        tensor.copy_(torch.rand(tensor.shape, generator=torch.Generator().manual_seed(99)))

    def of_rank_0(self, value: Any) -> Any:
        """What rank 0 gives; collective."""
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.ranks.group_of(0))
        return values[0]

    def exchange_with_last_rank(self, parts: list[torch.Tensor]) -> None:
        """Have rank 0 and the last one put each other's elements into their parts, one part after the other,
        as far as both go; collective."""
        rank, size = self.ranks.rank, self.ranks.size
        everything = torch.cat([part.reshape(-1) for part in parts])
        theirs: list[torch.Tensor] = [everything for _ in range(size)]
        dist.all_gather_object(theirs, everything.cpu(), group=self.ranks.group_of(0))
        if rank not in (0, size - 1):
            return
        partner = theirs[size - 1 - rank]
        common = min(everything.numel(), partner.numel())
        everything[:common] = partner[:common].to(everything.device)
        for part, values in zip(parts, everything.split([part.numel() for part in parts]), strict=True):
            part.copy_(values.reshape(part.shape))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
