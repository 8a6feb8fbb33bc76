"""Negative controls: before a load its target is made different in everything that is loaded. What a
comparison does not report then, it could not have reported after a load that restored nothing."""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from dcpbench.verify.compare import BITS, bits, compare, same_value
from dcpbench.verify.snapshot import (
    DigestedLeaf,
    Idle,
    Leaves,
    TensorLeaf,
    has_extra_state,
    local_part,
    persistent_tensors,
)

_PART = 0.4375
_OTHER_WORDS = {"min": "max", "max": "min", "rel": "abs", "abs": "rel"}


def perturb_model(model: nn.Module, seed: int) -> None:
    """Change every element of every parameter and persistent buffer, in place, and all extra state."""
    live = {id(tensor): tensor for tensor in persistent_tensors(model).values()}
    _perturb(live.values(), seed)
    for module in filter(has_extra_state, model.modules()):
        module.set_extra_state(perturbed(module.get_extra_state()))


def perturb_optimizer(optimizer: torch.optim.Optimizer, seed: int, saved: Leaves | None = None) -> None:
    """Change every element of every state tensor and every hyperparameter, in place; this to what it is not
    in what was `saved`, for a flag that no load has restored would be what it was after two changes."""
    values = (value for entries in optimizer.state.values() for value in entries.values())
    _perturb((value for value in values if isinstance(value, torch.Tensor)), seed)
    for number, group in enumerate(optimizer.param_groups):
        for key in group.keys() - {"params"}:
            group[key] = perturbed(group[key])
            if same_value(group[key], (saved or {}).get(f"param_groups.{number}.{key}", group)):
                group[key] = perturbed(group[key])


@torch.no_grad()
def jitter(tensors: Iterable[torch.Tensor], share: float, seed: int) -> None:
    """Multiply each element by 1 + `share` or 1 - `share`, in place; the same on every rank that draws the
    same shapes. Integers stay."""
    generators: dict[torch.device, torch.Generator] = {}
    for tensor in tensors:
        if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.element_size() == 1:
            continue
        if tensor.device not in generators:
            generators[tensor.device] = torch.Generator(tensor.device).manual_seed(seed)
        up = torch.rand(tensor.shape, generator=generators[tensor.device], device=tensor.device) < 0.5
        precise = torch.complex128 if tensor.is_complex() else torch.float64
        tensor.copy_(tensor.to(precise) * torch.where(up, 1 + share, 1 - share))


@torch.no_grad()
def _perturb(tensors: Iterable[torch.Tensor], seed: int) -> None:
    """Add random whole numbers of 16 to 32, drawn where a tensor lies, and the same on every rank that draws
    the same shapes. What is not finite, to which nothing can be added, starts from 0."""
    generators: dict[torch.device, torch.Generator] = {}
    for tensor in tensors:
        local = _addable(local_part(tensor))
        local.nan_to_num_(0.0, 0.0, 0.0)
        if local.dtype == torch.bool:
            local.logical_not_()
        elif local.ndim:
            device = local.device
            if device not in generators:
                generators[device] = torch.Generator(device).manual_seed(seed)
            noise = torch.rand(local.shape, generator=generators[device], device=device)
            local.add_(noise.mul_(16).add_(16).round_().to(local.dtype))
        else:
            # Step counters must stay alike: FSDP1 refuses ranks and parameters out of step.
            local.add_(16)


def _addable(local: torch.Tensor) -> torch.Tensor:
    """A tensor's elements as a dtype that can be added to, in the same memory."""
    if local.is_complex():
        return torch.view_as_real(local)
    narrow = local.is_floating_point() and local.element_size() == 1
    if narrow or local.dtype in (torch.uint16, torch.uint32, torch.uint64):
        return local.view(BITS[local.element_size()])
    return local


def perturbed(value: Any) -> Any:
    """Another value that a step can still be taken with: DCP takes one to fill an empty optimizer.

    A flag that is off becomes None and None becomes off, for not every flag may be turned on
    everywhere (`capturable` on the CPU), and one that is on becomes 1: what state an optimizer has depends on
    its flags (`amsgrad`). Nothing is turned on by 0 either, which becomes -0.0: with a momentum an SGD that
    has no state would get some. Other numbers become 7/16 of themselves, which no schedule of halves and
    quarters comes to. The words that a `ReduceLROnPlateau` knows become its other ones.
    None in a list is no flag and stays: a `LambdaLR` has it for each of its functions.
    """
    if value is None:
        return False
    if isinstance(value, bool):
        return 1 if value else None
    if isinstance(value, float) and not math.isfinite(value):
        return 0.0
    if isinstance(value, int | float):
        return value * _PART or (-0.0 if same_value(value, 0.0) else 0.0)
    if isinstance(value, str):
        return _OTHER_WORDS.get(value, f"{value}'")
    if isinstance(value, dict):
        return type(value)({key: perturbed(item) for key, item in value.items()})
    if isinstance(value, tuple | list):
        return type(value)(None if item is None else perturbed(item) for item in value)
    if isinstance(value, torch.Tensor):  # a learning rate, say
        return torch.where(value != 0, value * _PART, -value)
    raise TypeError(f"a hyperparameter of type {type(value).__name__} has no negative control yet")


def made_different(leaf: Any) -> Any:
    """Another leaf, a tensor by the last bit: a control where no unrestored state is at hand."""
    if isinstance(leaf, Idle):
        return leaf
    if isinstance(leaf, TensorLeaf):
        copied = replace(leaf, local=leaf.local.clone(memory_format=torch.contiguous_format))
        bits(copied.local)[-1:].bitwise_xor_(1)
        return copied
    if isinstance(leaf, DigestedLeaf):
        (one, other), *rest = leaf.blocks
        return replace(leaf, blocks=((one ^ 1, other), *rest))
    changed = perturbed(leaf)
    # A list in which nothing can be: of the parameters of a group that has none, of functions.
    return [leaf] if same_value(changed, leaf) else changed


def all_different(leaves: Leaves) -> Leaves:
    """A copy in which every leaf is another."""
    return {name: made_different(leaf) for name, leaf in leaves.items()}


def with_changed_constants(expected: Leaves, unrestored: Leaves, names: Iterable[str]) -> Leaves:
    """An unrestored state, with another value for what of these `names` is in it as expected: nothing changes
    that."""
    held = {name: unrestored[name] for name in names if name in expected}
    found = compare({name: expected[name] for name in held}, held, closely=False)
    same = held.keys() - {one.name for one in found}
    return {**unrestored, **all_different({name: held[name] for name in same})}


def with_other_names(leaves: Leaves) -> Leaves:
    """With the names of each group's parameters made different, which in a live optimizer nobody may do."""
    names = {name: leaf for name, leaf in leaves.items() if name.endswith(".params")}
    return {**leaves, **{name: made_different(leaf) for name, leaf in names.items()}}


def compared_names(saved: Leaves) -> dict[str, bool]:
    """The names of what there is to compare, and whether this rank has any of it: not of an empty shard. A
    tensor without elements anywhere has nothing to compare."""
    extents = {name: getattr(leaf, "extent", None) for name, leaf in saved.items()}
    return {
        name: extent is None or extent.numel > 0
        for name, extent in extents.items()
        if not isinstance(saved[name], Idle) and (extent is None or math.prod(extent.shape))
    }


def controllable(saved: Leaves) -> list[str]:
    """The names that a control has to report: those of which this rank has something."""
    return [name for name, here in compared_names(saved).items() if here]
