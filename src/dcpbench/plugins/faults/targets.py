"""The state of one rank that a fault damages, with methods to find and change one part of it."""

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

import torch

from dcpbench.checkpointers.base import Checkpointer, Ranks
from dcpbench.compare.across_layouts import gathered_values
from dcpbench.core.state import text_of
from dcpbench.plugins.faults.expected import NothingToInjectError
from dcpbench.state.snapshot import TensorLeaf, snapshot_model, snapshot_nested, snapshot_optimizer

Found = TypeVar("Found")


@dataclass
class Target:
    """The loaded, live or staged state of one rank, and its checkpoint.

    Args:
        state: `Stateful` objects or their state dicts by key; empty if files are damaged.
        ranks: this rank and its peers.
        folder: the checkpoint.
        first: the cell's first checkpoint; in a later stage, the oldest that exists.
        checkpointer: saves and loads it.
        kept: values that a fault keeps from one save to the next.
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
        state = self.state["optimizer"]
        groups: list[dict[str, Any]] = (
            state["param_groups"] if isinstance(state, dict) else state.optimizer.param_groups
        )
        return groups

    def parts(self, key: str) -> dict[str, TensorLeaf]:
        """Return this rank's parts of the tensors whose flattened keys match a pattern (`model.*.bias`), by
        key, the largest first. Parts of an uneven shard can be empty."""
        name, pattern = key.split(".", 1)
        state = self.state[name]
        if isinstance(state, dict):
            leaves = snapshot_nested(state)
        elif name in ("model", "ema"):
            leaves = snapshot_model(state.model)
        elif name == "optimizer":
            leaves = snapshot_optimizer(state.model, state.optimizer)
        else:
            leaves = snapshot_nested(state.state_dict())
        matching = [
            (f"{name}.{text_of(below)}", leaf)
            for below, leaf in leaves.items()
            if isinstance(leaf, TensorLeaf) and fnmatchcase(text_of(below), pattern)
        ]
        return dict(sorted(matching, key=lambda name_and_leaf: name_and_leaf[1].local.numel(), reverse=True))

    def largest(self, key: str) -> torch.Tensor:
        """Return the elements of the largest of these parts in one dimension."""
        return self.one_of(leaf.local.view(-1) for leaf in self.parts(key).values())

    def one_of(self, candidates: Iterable[Found]) -> Found:
        """Return the first item.

        Raises:
            NothingToInjectError: there is none.
        """
        for candidate in candidates:
            return candidate
        raise NothingToInjectError("there is no value that it could damage")

    def flip(self, flat: torch.Tensor) -> None:
        """Flip the lowest bit of the element with the largest magnitude."""
        if not flat.numel():
            raise NothingToInjectError("this rank has no elements")
        integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
        flat.view(integers)[int(flat.abs().argmax().item())] ^= 1

    def gathered(self, value: Any) -> list[Any]:
        """Return this value of each rank, on every rank; collective.

        Raises:
            NothingToInjectError: there is no other rank.
        """
        if self.ranks.size == 1:
            raise NothingToInjectError("it needs several ranks")
        return gathered_values(value, self.ranks.group_of(0))
