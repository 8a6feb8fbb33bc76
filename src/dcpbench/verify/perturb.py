"""Negative controls: before a load its target is made different in everything that is loaded.

Whatever the comparison then does not report as different, it could not have reported after a load
that restored nothing.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from dcpbench.verify.compare import same_value
from dcpbench.verify.compare_layouts import WholeDigest
from dcpbench.verify.retain import DigestedLeaf
from dcpbench.verify.snapshot import Idle, Leaf, Leaves, TensorLeaf, local_part, persistent_tensors


@dataclass
class _Noise:
    """Random numbers where the state lies; the same on every rank that draws the same shapes."""

    seed: int
    generators: dict[torch.device, torch.Generator] = field(default_factory=dict)

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Uniform between 0 and 1, in float32, of the tensor's shape and on its device."""
        device = tensor.device
        if device not in self.generators:
            self.generators[device] = torch.Generator(device).manual_seed(self.seed)
        return torch.rand(tensor.shape, generator=self.generators[device], device=device)


@torch.no_grad()
def perturb_model(model: nn.Module, seed: int) -> None:
    """Change every element of every parameter and persistent buffer, in place."""
    noise = _Noise(seed)
    for value in persistent_tensors(model).values():
        _perturb(local_part(value), noise)


@torch.no_grad()
def perturb_optimizer(optimizer: torch.optim.Optimizer, seed: int) -> None:
    """Change every element of every state tensor and every hyperparameter, in place."""
    noise = _Noise(seed)
    for entries in optimizer.state.values():
        for value in entries.values():
            if isinstance(value, torch.Tensor):
                _perturb(local_part(value), noise)
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
    everywhere (`capturable` on the CPU). Nothing is turned on by 0 either, which becomes -0.0: with a
    momentum an SGD that has no state would get some.
    """
    if value is None:
        return False
    if isinstance(value, bool):
        return False if value else None
    if isinstance(value, int | float):
        return value * 0.5 or (-0.0 if same_value(value, 0.0) else 0.0)
    if isinstance(value, str):
        return f"{value}'"
    if isinstance(value, tuple | list):
        return type(value)(perturbed(item) for item in value)
    raise TypeError(f"a hyperparameter of type {type(value).__name__} has no negative control yet")


def made_different(leaf: Leaf) -> Leaf:
    """Another one: a control where no unrestored state is at hand."""
    if isinstance(leaf, Idle):
        return leaf
    if isinstance(leaf, TensorLeaf):
        copied = replace(leaf, local=leaf.local.clone())
        _perturb(copied.local, _Noise(0))
        return copied
    if isinstance(leaf, DigestedLeaf):
        (one, other), *rest = leaf.blocks
        return replace(leaf, blocks=((one ^ 1, other), *rest))
    return perturbed(leaf)


def _perturb(local: torch.Tensor, noise: _Noise) -> None:
    if local.dtype == torch.bool:
        local.logical_not_()
    elif local.ndim:
        local.add_(noise.like(local).mul_(16).add_(16).round_().to(local.dtype))
    else:
        # Scalars are step counters, which must stay alike: FSDP1 refuses ranks and parameters out of step.
        local.add_(16)


def controllable(saved: Leaves) -> list[str]:
    """The names that a control has to report: all but empty shards and the parameters' names."""
    return [
        name
        for name, leaf in saved.items()
        if not isinstance(leaf, Idle)
        and not (isinstance(leaf, TensorLeaf) and leaf.local.numel() == 0)
        and not (isinstance(leaf, WholeDigest) and 0 in leaf.shape)
        and not name.endswith(".params")
    ]
