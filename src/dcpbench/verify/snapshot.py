"""The live state of one rank, where it lies: the ground truth of every comparison.

A snapshot does not go through DCP's state-dict functions. They are part of what is under test, and
a fault that they make on the way in and undo on the way out would be invisible to them. It reads
the parameters, buffers and optimizer entries of this rank as training uses them: a DTensor's local
shard, FSDP1's view into its flat parameter, a replica. Its tensors are those of the live state and
change with it: `dcpbench.verify.retain` makes of them what outlives the moment.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from dcpbench.verify.layout import Extent, extent_of, parameter_extents

_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


@dataclass(frozen=True)
class TensorLeaf:
    """A tensor's part on this rank, where it lies in the whole, how a DTensor says it is placed, and
    what kind of state it is: a param, a buffer, an optimizer's exp_avg, ….

    `local` has `extent.numel` elements.
    """

    local: torch.Tensor
    extent: Extent
    placements: str | None
    kind: str = "tensor"

    @property
    def dtype(self) -> torch.dtype:
        return self.local.dtype


@dataclass(frozen=True)
class Idle:
    """An optimizer's entry for a parameter of which this rank holds no element.

    Some optimizers and wrappers keep such entries and some do not, and FSDP1 keeps them or not from
    one call to the next: they may be absent. Where both sides have one, they must be equal.
    """

    leaf: TensorLeaf | Any


Leaf = TensorLeaf | Idle | Any
Leaves = dict[str, Leaf]
"""Every piece of state by its name: tensors as `TensorLeaf` or, retained, as `DigestedLeaf`; all else as a
copy of the value."""


def snapshot_model(model: nn.Module) -> Leaves:
    """Parameters and persistent buffers by FQN."""
    extents = parameter_extents(model)
    return {
        name: _leaf(value, "param" if isinstance(value, nn.Parameter) else "buffer", extents.get(id(value)))
        for name, value in persistent_tensors(model).items()
    }


def snapshot_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> Leaves:
    """State entries as `state.<FQN>.<entry>`, hyperparameters as `param_groups.<n>.<key>`."""
    names = {id(value): name for name, value in named_parameters(model).items()}
    extents = parameter_extents(model)
    leaves: Leaves = {}
    for parameter, entries in optimizer.state.items():
        local_shape = local_part(parameter).shape
        idle = local_shape.numel() == 0
        for entry, value in entries.items():
            # A moment lies as its parameter does; a step counter or a factored moment does not.
            like = isinstance(value, torch.Tensor) and local_part(value).shape == local_shape
            extent = extents[id(parameter)] if like and local_shape else None
            leaf = _leaf(value, entry, extent)
            leaves[f"state.{names[id(parameter)]}.{entry}"] = Idle(leaf) if idle else leaf
    for number, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key == "params":
                value = [names[id(parameter)] for parameter in value]
            leaves[f"param_groups.{number}.{key}"] = _leaf(value, key)
    return leaves


def snapshot_nested(nested: dict[str, Any], prefix: str = "") -> Leaves:
    """What nested dictionaries hold, by the path to it with dots between its keys."""
    leaves: Leaves = {}
    for key, value in nested.items():
        if isinstance(value, dict):
            leaves.update(snapshot_nested(value, f"{prefix}{key}."))
        else:
            leaves[f"{prefix}{key}"] = _leaf(value, str(key))
    return leaves


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The live parameters of this rank by FQN, tied ones under each of their names."""
    return {plain_fqn(model, name): value for name, value in model.named_parameters(remove_duplicate=False)}


def persistent_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """What a model's state dict holds, live: parameters and persistent buffers by FQN."""
    tensors: dict[str, torch.Tensor] = dict(named_parameters(model))
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, value in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                tensors[plain_fqn(model, f"{prefix}.{name}" if prefix else name)] = value
    return tensors


def plain_fqn(model: nn.Module, name: str) -> str:
    """The name that a parameter has in the unwrapped model."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    inner = getattr(model, "_orig_mod", model)
    return name.removeprefix("module.") if isinstance(inner, DistributedDataParallel) else name


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor, detached; not a copy."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def kind_of(name: str, leaf: Leaf) -> str:
    """What kind of state a leaf is: param, buffer, exp_avg, step, lr, scheduler, ….

    Of what is no tensor the name tells it: a hyperparameter's key, or the object that it is of.
    """
    if isinstance(leaf, Idle):
        return kind_of(name, leaf.leaf)
    if kind := getattr(leaf, "kind", None):
        return str(kind)
    first, *rest = name.split(".")
    return rest[-1] if rest and first in ("param_groups", "state") else first


def _leaf(value: Any, kind: str, extent: Extent | None = None) -> Leaf:
    """A tensor is all there or a DTensor unless its extent says otherwise."""
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    return TensorLeaf(
        local=local_part(value),
        extent=extent or extent_of(value),
        placements=str(value.placements) if isinstance(value, DTensor) else None,
        kind=kind,
    )
