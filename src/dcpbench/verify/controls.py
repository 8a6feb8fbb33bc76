"""Negative controls: before a load its target is made different in everything that is loaded.

Whatever the comparison then does not report as different, it could not have reported after a load
that restored nothing.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from dcpbench.verify.snapshot import Idle, Leaves, TensorLeaf, local_part, persistent_tensors


@torch.no_grad()
def perturb_model(model: nn.Module, seed: int) -> None:
    """Change every element of every parameter and persistent buffer, in place."""
    generator = torch.Generator().manual_seed(seed)
    for value in persistent_tensors(model).values():
        _perturb(local_part(value), generator)


@torch.no_grad()
def perturb_optimizer(optimizer: torch.optim.Optimizer, seed: int) -> None:
    """Change every element of every state tensor and every hyperparameter, in place."""
    generator = torch.Generator().manual_seed(seed)
    for entries in optimizer.state.values():
        for value in entries.values():
            if isinstance(value, torch.Tensor):
                _perturb(local_part(value), generator)
    for group in optimizer.param_groups:
        for key, value in group.items():
            if key != "params":
                group[key] = perturbed(value)


def perturbed_values(values: dict[str, Any]) -> dict[str, Any]:
    """A dictionary with another value under each of its keys."""
    return {key: perturbed(value) for key, value in values.items()}


def perturbed(value: Any) -> Any:
    """Another value that a step can still be taken with: DCP takes one to fill an empty optimizer.

    A flag that is off becomes None and None becomes off, for not every flag may be turned on
    everywhere (`capturable` on the CPU).
    """
    if value is None:
        return False
    if isinstance(value, bool):
        return False if value else None
    if isinstance(value, int | float):
        return value * 0.5 + 0.25
    if isinstance(value, str):
        return f"{value}'"
    if isinstance(value, tuple | list):
        return type(value)(perturbed(item) for item in value)
    raise TypeError(f"a hyperparameter of type {type(value).__name__} has no negative control yet")


def made_different(leaves: Leaves) -> Leaves:
    """A copy of leaves in which every one is another: a control where no unrestored state is at hand."""
    generator = torch.Generator().manual_seed(0)
    changed: Leaves = {}
    for name, leaf in leaves.items():
        if isinstance(leaf, Idle):
            changed[name] = leaf
        elif isinstance(leaf, TensorLeaf):
            copied = replace(leaf, local=leaf.local.clone())
            _perturb(copied.local, generator)
            changed[name] = copied
        else:
            changed[name] = perturbed(leaf)
    return changed


def _perturb(local: torch.Tensor, generator: torch.Generator) -> None:
    if local.dtype == torch.bool:
        local.logical_not_()
        return
    # Scalars are step counters, which must stay alike: FSDP1 refuses ranks and parameters out of step.
    noise = torch.rand(local.shape, generator=generator) if local.ndim else 0.0
    local.add_(torch.as_tensor(16 + 16 * noise).round().to(local))


def controllable(saved: Leaves) -> list[str]:
    """The names that a control has to report: all but empty shards and the parameters' names."""
    return [
        name
        for name, leaf in saved.items()
        if not isinstance(leaf, Idle)
        and not (isinstance(leaf, TensorLeaf) and leaf.local.numel() == 0)
        and not name.endswith(".params")
    ]
