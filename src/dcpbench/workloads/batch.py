"""What a batch may be, and how ranks share one.

A batch is a pytree: tensors, NumPy arrays, texts and numbers in dictionaries, lists, tuples, dataclasses and
whatever else torch's pytrees know. Tensors in another container would not reach the device, and each rank
would train on all of them. So it is refused, unless the workload shares its batches itself.
"""

import copy
import inspect
import numbers
import textwrap
from collections import UserDict
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import PurePath
from types import ModuleType
from typing import Any, NoReturn

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

Batch = Any
"""A pytree."""
Share = Callable[[Batch, int, int], Batch]
"""`share(batch, number, of)` returns the part of a batch for one of several ranks, numbered from 0."""

_PLAIN = (
    *(str, bytes, numbers.Number, np.generic, type(None), Enum, PurePath),
    *(torch.dtype, torch.device, torch.Size),
)
"""Values in which there is nothing to share."""
_ARRAYS = (torch.Tensor, np.ndarray)
_LENGTH = 200
"""The number of characters to which the shapes in an error are shortened."""


def _items(node: Any) -> dict[Any, Any] | None:
    """Return the items of a container by key; None of anything else."""
    if isinstance(node, (*_PLAIN, *_ARRAYS, PackedSequence)):
        return None
    if isinstance(node, dict | UserDict):
        return dict(node.items())
    if is_dataclass(node) and not isinstance(node, type):
        return {field.name: getattr(node, field.name) for field in fields(node)}
    if isinstance(node, list | tuple):
        return dict(enumerate(node))
    if pytree.tree_is_leaf(node):
        return None
    return dict(enumerate(pytree.tree_leaves(node, is_leaf=lambda inner: inner is not node)))


def _rebuilt(node: Any, items: dict[Any, Any]) -> Any:
    """Return a copy of a container with other items under the same keys."""
    if not pytree.tree_is_leaf(node):
        structure = pytree.tree_structure(node, is_leaf=lambda inner: inner is not node)
        return pytree.tree_unflatten([*items.values()], structure)
    if isinstance(node, list | tuple):
        return type(node)(items.values())
    copied, before = copy.copy(node), _items(node) or {}
    for name, item in items.items():
        if isinstance(node, dict | UserDict):
            copied[name] = item
        # Some dictionaries have their items as attributes too.
        if is_dataclass(node) or getattr(copied, "__dict__", {}).get(name) is before[name]:
            object.__setattr__(copied, name, item)
    return copied


def mapped(
    change: Callable[[Any], Any],
    batch: Batch,
    unknown: Callable[[Any], Any] | None = None,
    is_leaf: Callable[[Any], bool] = lambda node: isinstance(node, _ARRAYS),
) -> Batch:
    """Return the same structure with every tensor and array changed, in their order.

    Args:
        unknown: changes an object in which dcpbench cannot find tensors; by default it is refused.
        is_leaf: what `change` is called with, if not with each tensor and array.

    Raises:
        TypeError: an unknown object is refused.
    """
    unknown = unknown or _refuse

    def changed(node: Any) -> Any:
        if is_leaf(node):
            return change(node)
        if isinstance(node, (*_PLAIN, *_ARRAYS)):
            return node
        items = _items(node)
        if items is None:
            return unknown(node)
        return _rebuilt(node, {key: changed(item) for key, item in items.items()})

    return changed(batch)


def check_containers(batch: Batch) -> None:
    """Check that every tensor can be moved to a device.

    Raises:
        TypeError: an unknown object cannot move itself.
    """
    mapped(
        lambda value: value,
        batch,
        lambda node: node if callable(getattr(node, "to", None)) else _refuse(node),
    )


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Move tensors, and unknown objects that can move themselves, to a device. Arrays stay where they are."""

    def moved(value: Any) -> Any:
        return value.to(device) if callable(getattr(value, "to", None)) else value

    return mapped(moved, batch, moved)


def leaves(batch: Batch) -> list[Any]:
    """Return everything that is no container, in order; of unknown objects the tensors and arrays in them."""
    found, visited = list[Any](), dict[int, Any]()
    passed_over = (*_PLAIN, type, ModuleType)

    def visit(node: Any, in_object: bool) -> None:
        if isinstance(node, _ARRAYS) or (isinstance(node, _PLAIN) and not in_object):
            found.append(node)
        elif not (isinstance(node, passed_over) or inspect.isroutine(node) or id(node) in visited):
            items = _items(node)
            if items is None:
                in_object = True
                items = {0: [*node] if isinstance(node, PackedSequence) else object.__getstate__(node)}
            if in_object:
                visited[id(node)] = node  # objects can contain each other
            for item in items.values():
                visit(item, in_object)

    visit(batch, in_object=False)
    return found


def samples_of(batch: Batch) -> int | None:
    """Return the number of samples; None if there are none to share, or the shapes do not show it."""
    try:
        return _samples(batch)
    except ValueError:
        return None


def share_of(batch: Batch, number: int, of: int) -> Batch:
    """Return one of several parts of the samples; the first ones have one more if they do not divide.

    Samples are along the first dimension of tensors and arrays, which must agree on it; one of 1 is for all.
    A list or tuple within the batch with as many items is divided by its items, and so is a list of
    containers whose first dimensions differ. The rest is for all.

    Raises:
        ValueError: there are fewer samples than parts, or the shapes do not show what a sample is.
        TypeError: dcpbench cannot find the tensors.
    """
    check_containers(batch)
    samples = _samples(batch)
    if samples is not None and samples < of:
        count = f"{samples} {'sample' if samples == 1 else 'samples'}"
        raise ValueError(f"{count} for {of} shares: each needs one; the shapes are {_shapes(batch)}")

    def is_shared(node: Any) -> bool:
        if isinstance(node, _ARRAYS):
            return node.ndim > 0 and _length(node) == samples
        return _is_list(node) and len(node) == samples and (node is not batch or _has_samples(batch))

    def part(node: Any) -> Any:
        mine = part_of(_length(node), number, of)
        if getattr(node, "is_nested", False):
            return torch.nested.as_nested_tensor([*node.unbind()][mine.start : mine.stop], layout=node.layout)
        if getattr(node, "layout", torch.strided) is not torch.strided:
            raise _not_shown(batch)
        return node[mine.start : mine.stop]

    return mapped(part, batch, is_leaf=is_shared)


def part_of(samples: int, number: int, of: int) -> range:
    """Return the samples of one of several parts; the first parts have one more if they do not divide."""
    begin = number * (samples // of) + min(number, samples % of)
    return range(begin, begin + samples // of + (number < samples % of))


def _refuse(node: Any) -> NoReturn:
    raise TypeError(
        f"contains a {type(node).__name__}, in which dcpbench finds no tensors: use dictionaries, lists, "
        "tuples or dataclasses of tensors and arrays, or pass share(batch, number, of)"
    )


def _samples(batch: Batch) -> int | None:
    """Return the number of samples; None if everything is for all.

    Raises:
        ValueError: the shapes do not show what a sample is.
    """
    if _has_samples(batch):
        return len(batch)
    arrays, lists = list[Any](), list[Any]()

    def sort(node: Any) -> None:
        if isinstance(node, _ARRAYS):
            arrays.append(node)
        elif _is_list(node) and (node is not batch or all(isinstance(item, _PLAIN) for item in node)):
            lists.append(node)
        else:
            for item in (_items(node) or {}).values():
                sort(item)

    sort(batch)
    sizes = _rows(arrays) - {1} or _rows(arrays)
    samples = next(iter(sizes), None)
    is_shown = len(sizes) <= 1
    for node in filter(None, lists):
        rows = _rows(leaves(node)) - {1}
        if len(node) == samples:
            is_shown &= rows != {samples}  # or each of its tensors has all samples
        else:
            is_shown &= samples is not None and not rows
    if not is_shown:
        raise _not_shown(batch)
    return samples


def _has_samples(batch: Batch) -> bool:
    """Return whether a batch is a list of samples: of containers with the same keys, whose tensors differ in
    their first dimensions.

    Raises:
        ValueError: they do not differ, so that each container can have a part of all samples.
    """
    containers = [_items(item) for item in batch] if isinstance(batch, list) else []
    if not containers or None in containers:
        return False
    keys = [{*(items or ())} for items in containers]
    if len(keys) > 1 and sum(map(len, keys)) == len(set[Any]().union(*keys)):
        return False
    rows = [_rows(leaves(item)) for item in batch]
    if any(one != keys[0] for one in keys) or all(one == rows[0] for one in rows):
        raise _not_shown(batch)
    return True


def _is_list(node: Any) -> bool:
    return isinstance(node, list) or type(node) is tuple


def _rows(nodes: Iterable[Any]) -> set[int]:
    """Return the first dimensions of tensors and arrays."""
    return {_length(node) for node in nodes if isinstance(node, _ARRAYS) and node.ndim}


def _length(node: Any) -> int:
    return int(node.size(0)) if isinstance(node, torch.Tensor) else len(node)  # a nested one has no `len`


def _not_shown(batch: Batch) -> ValueError:
    return ValueError(
        f"the shapes {_shapes(batch)} do not show what a sample is: pass share(batch, number, of)"
    )


def _shapes(batch: Batch) -> str:
    """Return the shapes of tensors and arrays as a text, in their containers."""

    def text(node: Any) -> str:
        if getattr(node, "is_nested", False):
            return f"nested ({_length(node)}, …)"
        if isinstance(node, _ARRAYS):
            return str(tuple(node.shape))
        items = _items(node)
        if items is None:
            return type(node).__name__
        if isinstance(node, list | tuple):
            return f"[{', '.join(map(text, items.values()))}]"
        return f"{{{', '.join(f'{key}: {text(item)}' for key, item in items.items())}}}"

    return textwrap.shorten(text(batch), _LENGTH, placeholder=" …")
