"""Negative controls: before a load, everything in its target that is loaded is changed. A comparison that
does not report a change could not have detected that the load restored nothing."""

import copy
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from dcpbench.compare.leaves import BITS, bits, compare, same_value
from dcpbench.core.mismatch import Mismatch
from dcpbench.core.rank_report import Compared, Skip
from dcpbench.core.state import Name, text_of
from dcpbench.state.snapshot import (
    DigestedLeaf,
    EmptyShard,
    Leaves,
    TensorLeaf,
    is_container,
    leaf_slots,
    local_part,
    persistent_tensors,
)
from dcpbench.torch_private import SCALE_FUNCTION

_PART = 0.4375
_OTHER_WORDS = {"min": "max", "max": "min", "rel": "abs", "abs": "rel"}


def perturb_model(model: nn.Module, seed: int, kept: Callable[[str], bool] = lambda name: False) -> set[Name]:
    """Change every element of every parameter and persistent buffer, in place, except for FQNs that are
    `kept`. Return the names of these."""
    tensors = persistent_tensors(model)
    unchanged: set[Name] = {(name,) for name in tensors if kept(name)}
    live = {id(tensor): tensor for name, tensor in tensors.items() if (name,) not in unchanged}
    perturb(live.values(), seed)
    return unchanged


def perturb_optimizer(optimizer: torch.optim.Optimizer, seed: int) -> set[Name]:
    """Change every element of every state tensor, every other value in the state and every hyperparameter, in
    place. Return the names of what cannot be changed in a live optimizer, the parameters of each group."""
    for inner_optimizer in getattr(optimizer, "optimizers", None) or [optimizer]:
        perturb(_change_values(inner_optimizer.state), seed)
    for group in optimizer.param_groups:
        for key in group.keys() - {"params"}:
            group[key] = perturbed(group[key], key)
    return {("param_groups", number, "params") for number in range(len(optimizer.param_groups))}


def _change_values(state: Any) -> Iterator[torch.Tensor]:
    """Change every value in the state of an optimizer, and yield the tensors unchanged. No step is taken with
    these values, so that a flag or None can become a number."""
    for owner, entries in [*state.items()]:
        for holder, name, _ in [*leaf_slots(entries)] if is_container(entries) else [(state, owner, ())]:
            if isinstance(state_value := holder[name], torch.Tensor):
                yield state_value
            else:
                holder[name] = (
                    _PART
                    if state_value is None or isinstance(state_value, bool)
                    else _another(state_value, name)
                )


@torch.no_grad()
def jitter(tensors: Iterable[torch.Tensor], epsilon: float, seed: int, least: int = -1) -> None:
    """Multiply each element by a random one of 1 + `epsilon` and 1 + `least` * `epsilon`, in place, the same
    on every rank for the same shapes. Integers stay unchanged."""
    generators: dict[torch.device, torch.Generator] = {}
    for tensor in tensors:
        if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.element_size() == 1:
            continue
        if tensor.device not in generators:
            generators[tensor.device] = torch.Generator(tensor.device).manual_seed(seed)
        up = torch.rand(tensor.shape, generator=generators[tensor.device], device=tensor.device) < 0.5
        precise = torch.complex128 if tensor.is_complex() else torch.float64
        tensor.copy_(tensor.to(precise) * torch.where(up, 1 + epsilon, 1 + least * epsilon))


@torch.no_grad()
def perturb(tensors: Iterable[torch.Tensor], seed: int) -> None:
    """Add random integers from 16 to 32, drawn on the tensor's device, the same on every rank for the same
    shapes. Elements that are not finite count as 0."""
    generators: dict[torch.device, torch.Generator] = {}
    flags: list[tuple[torch.Tensor, torch.Tensor]] = []
    changed = set()
    for tensor in tensors:
        local = _addable(local_part(tensor))
        place = local.data_ptr(), local.dtype, local.shape, local.stride()
        if local.numel() and place in changed:
            continue  # under a second name: elements of one byte could return to their original value
        changed.add(place)
        if local.dtype == torch.bool:
            flags.append((local, ~local))
            continue
        local.nan_to_num_(0.0, 0.0, 0.0)
        if local.ndim:
            device = local.device
            if device not in generators:
                generators[device] = torch.Generator(device).manual_seed(seed)
            noise = torch.rand(local.shape, generator=generators[device], device=device)
            local.add_(noise.mul_(16).add_(16).round_().to(local.dtype))
        else:
            # Step counters must stay equal: FSDP1 rejects ranks and parameters with different ones.
            local.add_(16)
    for local, others in flags:  # at the end: shared memory must not be inverted twice
        local.copy_(others)


def _addable(local: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor with a dtype that supports addition."""
    if local.is_complex():
        return torch.view_as_real(local)
    narrow = local.is_floating_point() and local.element_size() == 1
    if narrow or local.dtype in (torch.uint16, torch.uint32, torch.uint64):
        return local.view(BITS[local.element_size()])
    return local


@dataclass
class _Same:
    """A different object that does the same when called."""

    call: Callable[..., Any]

    def __call__(self, *values: Any, **named: Any) -> Any:
        return self.call(*values, **named)


def perturbed(value: Any, name: Any = None) -> Any:
    """Return a different value that still allows a step, because DCP takes one to initialize an optimizer.

    - False becomes None and None becomes False, because some flags cannot be set everywhere (`capturable` on
      the CPU). True becomes 1, because the state of an optimizer depends on its flags (`amsgrad`).
    - 0 becomes -0.0, because a momentum would give an SGD state that it does not have. Other numbers become
      7/16 of themselves, which no schedule of halves and quarters produces.
    - Arrays, and tensors of numbers other than floats, keep their dtype and shape.
    - The words that a `ReduceLROnPlateau` knows become its other ones.
    - A function or a class becomes another object that does the same.
    - None in a list is not a flag and stays: a `LambdaLR` has it for each of its functions, and a `CyclicLR`
      for its own.

    Args:
        name: of the value, for the message.

    Raises:
        Skip: a copy of the value cannot be compared with it.
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
    if isinstance(value, Mapping):
        kept = {key for key, element in value.items() if element is None and key == SCALE_FUNCTION.name}
        changed = {key: None if key in kept else perturbed(element, key) for key, element in value.items()}
        if not isinstance(value, MutableMapping):
            return changed
        copied = copy.copy(value)  # the same class, also of a `defaultdict`
        copied.update(changed)
        return copied
    if isinstance(value, tuple | list):
        make: Any = getattr(value, "_make", tuple if isinstance(value, tuple) else list)
        return make(None if element is None else perturbed(element, name) for element in value)
    if isinstance(value, torch.Tensor):
        if value.is_floating_point() and value.element_size() > 1:  # for example a learning rate
            return torch.where(value != 0, value * _PART, -value)
        perturb([changed_tensor := value.clone()], seed=0)
        return changed_tensor
    if isinstance(value, np.ndarray | np.generic):
        return _other_array(np.asarray(value), name)[() if isinstance(value, np.generic) else ...]
    if isinstance(value, torch.dtype):
        return torch.float32 if value == torch.float64 else torch.float64
    if isinstance(value, torch.device):
        return torch.device(f"{value.type}:0" if value.index is None else value.type)
    if callable(value):
        return _Same(value)
    if same_value(value, copy.deepcopy(value)):
        return [value]
    which = f"the hyperparameter {name!r}" if name else "a hyperparameter"
    why = f"of type {type(value).__name__} cannot be compared with a copy of it"
    raise Skip(f"{which} {why}; keep a number, text, list or dictionary that it can be built from")


def _other_array(array: Any, name: Any) -> Any:
    """Return an array of the same type and shape, in which each element is different; an empty one has an
    element more."""
    if not array.size:
        return np.zeros(1, array.dtype)
    if array.dtype.hasobject:
        changed = np.empty_like(array)
        for place, element in np.ndenumerate(array):
            changed[place] = _another(element, name)
        return changed
    if array.dtype.kind in "fc":
        return np.where(array != 0, np.nan_to_num(array) * array.dtype.type(_PART), -array)
    if array.dtype.kind in "iu":
        return array + array.dtype.type(16)  # which may wrap around
    # The lowest bit of a flag, or of the first letter of a text.
    content = np.frombuffer(bytearray(array.tobytes()), np.uint8).reshape(array.size, -1)
    content[:, :1] ^= 1
    return content.view(array.dtype).reshape(array.shape)


def perturbed_leaf(leaf: Any, name: Any = None, elements: slice = slice(-1, None)) -> Any:
    """Return a different leaf, for a control without an unrestored state; a tensor differs in one bit of each
    of these elements, by default of the last."""
    if isinstance(leaf, EmptyShard):
        return leaf
    if isinstance(leaf, TensorLeaf):
        local = leaf.local.clone(memory_format=torch.contiguous_format)
        bits(local)[elements].bitwise_xor_(1)
        return TensorLeaf(local, leaf.extent, leaf.placements, leaf.kind)
    if isinstance(leaf, DigestedLeaf):
        (first_lane, second_lane), *rest = leaf.blocks
        return replace(leaf, blocks=((first_lane ^ 1, second_lane), *rest))
    return _another(leaf, name)


def _another(value: Any, name: Any) -> Any:
    """Return a different value. A value that `perturbed` cannot change becomes a list with it: the empty list
    of a group without parameters, or a list of None."""
    changed = perturbed(value, name)
    return [value] if same_value(changed, value) else changed


def perturbed_leaves(leaves: Leaves) -> Leaves:
    """Return a copy in which every leaf is different."""
    return {name: perturbed_leaf(leaf, text_of(name)) for name, leaf in leaves.items()}


def perturbed_where(expected: Leaves, state: Leaves, unchanged: Iterable[Name]) -> Leaves:
    """Return a state for a negative control: an unrestored one with changed copies of what is `unchanged` in
    it. A value is changed from the expected one, which it then cannot be; a tensor from this rank's part."""
    due = [name for name in unchanged if name in expected and name in state]
    tensors = {
        name: state[name] for name in due if isinstance(state[name], TensorLeaf | DigestedLeaf | EmptyShard)
    }
    return state | perturbed_leaves({name: expected[name] for name in due} | tensors)


def compare_controlled(
    expected: Leaves,
    actual: Leaves,
    control: Leaves | None = None,
    proven: Collection[str] = (),
    how: Callable[..., list[Mismatch]] | None = None,
) -> Compared:
    """Compare two states bit for bit, part by part or as `how` does. The control compares `other`, by default
    a copy of `actual` in which everything is different, except the names that an earlier control has
    `proven`."""
    how = how or compare
    due = {name: leaf for name, leaf in expected.items() if text_of(name) not in proven}
    if control is None:
        control = perturbed_leaves({name: leaf for name, leaf in actual.items() if name in due})
    reported = {*proven, *(mismatch.name for mismatch in how(due, control, closely=False))}
    detected = {name: name in reported for name in names_of_control(expected)}
    return Compared(how(expected, actual), compared_names(expected), detected)


def compared_names(saved: Leaves) -> dict[str, bool]:
    """Return the names to compare, as texts, and whether this rank has a part: not if its shard is empty. A
    tensor without any elements is left out."""
    names: dict[str, bool] = {}
    for name, leaf in saved.items():
        if type(leaf) is TensorLeaf or type(leaf) is DigestedLeaf:
            if 0 not in leaf.extent.shape:
                names[text_of(name)] = leaf.extent.numel > 0
        elif type(leaf) is not EmptyShard:
            names[text_of(name)] = True
    return names


def names_of_control(saved: Leaves) -> list[str]:
    """Return the names that a control has to report: those of which this rank has a part."""
    return [name for name, here in compared_names(saved).items() if here]
