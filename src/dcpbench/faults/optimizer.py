"""Defects of the optimizer's state and hyperparameters after a load."""

import math
from typing import Any

import torch

from dcpbench.faults.targets import Site, flip, largest
from dcpbench.verify.snapshot import TensorLeaf


def moment_bit(site: Site, entry: str, number: int) -> None:
    """One bit of one element of a moment on one rank."""
    if site.victim:
        flip(largest(site.moments(entry)), number)


def moment_zeroed(site: Site, entry: str) -> None:
    """One parameter's moment is all zeros on one rank."""
    if site.victim:
        largest(site.moments(entry)).zero_()


def moment_through(site: Site, entry: str, dtype: str) -> None:
    """One parameter's moment went through a narrower dtype and back on one rank."""
    if site.victim:
        part = largest(site.moments(entry))
        part.copy_(part.to(getattr(torch, dtype)).to(part.dtype))


def moments_exchanged(site: Site) -> None:
    """First and second moments have each other's values on one rank."""
    if site.victim:
        first, second = site.moments("exp_avg"), site.moments("exp_avg_sq")
        for name, part in first.items():
            kept = part.clone()
            part.copy_(second[name])
            second[name].copy_(kept)


def moment_of_earlier_checkpoint(site: Site) -> None:
    """One parameter's first moment is that of an earlier checkpoint on one rank."""
    if site.victim:
        name, part = max(site.moments("exp_avg").items(), key=lambda item: item[1].numel())
        leaf = site.earlier[f"state.{name}.exp_avg"]
        assert isinstance(leaf, TensorLeaf)
        part.copy_(leaf.local.reshape(part.shape))


def moment_of_other_parameter(site: Site) -> None:
    """One parameter's first moment is that of another one, as far as it goes, on one rank."""
    if site.victim:
        parts = sorted(site.moments("exp_avg").values(), key=torch.Tensor.numel)
        one, other = parts[-1].view(-1), parts[0].reshape(-1)
        one[: other.numel()] = other


def step_off_by_one(site: Site) -> None:
    """One parameter's step counter on one rank."""
    if site.victim:
        next(iter(site.moments("step").values())).add_(1)


def steps_zeroed(site: Site) -> None:
    """Every step counter starts over."""
    for step in site.moments("step").values():
        step.zero_()


def state_dropped(site: Site) -> None:
    """One parameter has no state on one rank."""
    if site.victim:
        parameter = max(site.optimizer.state, key=torch.Tensor.numel)
        del site.optimizer.state[parameter]


def hyperparameter(site: Site, key: str, value: Any, group: int = 0) -> None:
    """One hyperparameter of one group is another one, on every rank."""
    given = list(value) if hasattr(value, "__iter__") else value
    site.optimizer.param_groups[group][key] = tuple(given) if isinstance(given, list) else given


def lr_next_float(site: Site) -> None:
    """The learning rate of the first group is the next larger float on one rank."""
    if site.victim:
        site.optimizer.param_groups[0]["lr"] = math.nextafter(site.optimizer.param_groups[0]["lr"], math.inf)


def lr_doubled(site: Site) -> None:
    """The learning rate of the first group was not restored."""
    site.optimizer.param_groups[0]["lr"] *= 2


def key_dropped(site: Site) -> None:
    """A group has lost its `initial_lr` on one rank."""
    if site.victim:
        del site.optimizer.param_groups[0]["initial_lr"]


def key_added(site: Site) -> None:
    """A group has a key that was never saved, on one rank."""
    if site.victim:
        site.optimizer.param_groups[0]["momentum"] = 0.9


def groups_exchanged(site: Site) -> None:
    """The two groups have each other's hyperparameters."""
    one, other = site.optimizer.param_groups[:2]
    for key in one.keys() - {"params"}:
        one[key], other[key] = other[key], one[key]
