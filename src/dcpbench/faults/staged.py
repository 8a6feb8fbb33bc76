"""Defects of what is handed to the writer: the state as it is staged, not the live one."""

from dataclasses import dataclass
from typing import Any

import torch

from dcpbench.verify.snapshot import local_part


@dataclass
class Staged:
    """A copy of all state dicts, as they are saved; `first` is that of the cell's first save."""

    state: dict[str, Any]
    first: dict[str, Any]
    rank: int
    world_size: int


def stale(staged: Staged) -> None:
    """The buffers of the first save are written again: a stager that copies nothing any more."""
    staged.state.update(staged.first)


def weight_changed(staged: Staged) -> None:
    """One weight is another one by the time it is copied, on every rank that has a part of it."""
    part = _part(staged, "net2.weight")
    if part.numel():
        part.view(-1)[0] += 0.001


def weight_through(staged: Staged, dtype: str) -> None:
    """One weight is staged in a narrower dtype, and comes back as if nothing had happened."""
    weights = staged.state["model"]
    weights["net2.weight"] = weights["net2.weight"].to(getattr(torch, dtype))


def moment_zeroed(staged: Staged) -> None:
    """A moment is staged as zeros."""
    local_part(staged.state["optimizer"]["state"]["net2.weight"]["exp_avg"]).zero_()


def key_dropped(staged: Staged) -> None:
    """A parameter is not saved at all."""
    del staged.state["model"]["net3.bias"]


def key_renamed(staged: Staged) -> None:
    """A parameter is saved under another name."""
    model = staged.state["model"]
    model["net3.offset"] = model.pop("net3.bias")


def key_added(staged: Staged) -> None:
    """The checkpoint has a tensor that nobody asked for."""
    staged.state["model"]["net9.weight"] = torch.ones(2)


def keys_exchanged(staged: Staged) -> None:
    """Two parameters are saved under each other's names."""
    model = staged.state["model"]
    model["net2.weight"], model["net3.weight"] = model["net3.weight"], model["net2.weight"]


def object_of_other_rank(staged: Staged) -> None:
    """What is saved of an object is not what this rank has."""
    staged.state["tensor_object"]["data"].add_(1)


def _part(staged: Staged, name: str) -> torch.Tensor:
    return local_part(staged.state["model"][name])
