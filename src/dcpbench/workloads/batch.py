"""What a batch may be, and how ranks share one.

A batch is a pytree: tensors, NumPy arrays, texts and numbers in dictionaries, lists, tuples, dataclasses and
whatever else torch's pytrees know. Tensors in another container would not reach the device, and each rank
would train on all of them. So it is refused, unless the workload shares its batches itself.
"""

import copy
import numbers
from collections import UserDict
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import PurePath
from typing import Any, NoReturn

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

Batch = Any
"""A pytree."""
Share = Callable[[Batch, int, int], Batch]
"""`share(batch, number, of)` returns the part of a batch for one of several ranks, numbered from 0."""

_PLAIN = (str, bytes, numbers.Number, np.generic, type(None), Enum, PurePath, torch.dtype, torch.device)
"""Values in which there is nothing to share."""
_ARRAYS = (torch.Tensor, np.ndarray)


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
        if not (isinstance(node, PackedSequence) or pytree.tree_is_leaf(node)):
            return pytree.tree_map(changed, node, is_leaf=lambda inner: inner is not node)
        if isinstance(node, dict | UserDict):
            copied = copy.copy(node)
            copied.update({name: changed(value) for name, value in node.items()})
            return copied
        if is_dataclass(node) and not isinstance(node, type):
            made = copy.copy(node)
            for field in fields(node):
                object.__setattr__(made, field.name, changed(getattr(node, field.name)))
            return made
        if isinstance(node, list | tuple) and not isinstance(node, PackedSequence):
            return type(node)(map(changed, node))
        return unknown(node)

    return changed(batch)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Move tensors, and unknown objects that can move themselves, to a device. Arrays stay where they are."""

    def moved(value: Any) -> Any:
        return value.to(device) if callable(getattr(value, "to", None)) else value

    return mapped(moved, batch, moved)


def leaves(batch: Batch) -> list[Any]:
    """Return everything that is no container, and unknown objects, in their order."""
    found: list[Any] = []
    mapped(found.append, batch, found.append, lambda node: isinstance(node, (*_PLAIN, *_ARRAYS)))
    return found


def samples_of(batch: Batch) -> int | None:
    """Return the number of samples; None if its tensors and arrays have different ones."""
    found: list[Any] = []

    def is_leaf(node: Any) -> bool:
        return isinstance(node, _ARRAYS) or _is_inner_list(batch, node)

    mapped(found.append, batch, found.append, is_leaf)
    sizes = _sizes(found)
    if not sizes:
        lengths, sizes = {len(node) for node in found if is_leaf(node)}, _sizes(leaves(batch))
        if len(lengths) == 1:
            # Lists of tensors of one size: there are more samples than channels, or than views of a sample.
            sizes = {max(lengths | sizes)} if len(sizes) == 1 else lengths
    return next(iter(sizes)) if len(sizes) == 1 else None


def share_of(batch: Batch, number: int, of: int) -> Batch:
    """Return one of several parts of the samples; the first ones have one more if they do not divide.

    Samples are along the first dimension of each tensor and array, or the items of a list of texts, numbers,
    or tensors of other sizes. What has no dimension, or a first one of 1 where others have more, is for all.

    Raises:
        ValueError: there are fewer samples than parts; or tensors have different numbers of samples, and one
            cannot be divided evenly.
        TypeError: dcpbench cannot find the tensors.
    """
    samples = samples_of(batch)

    def is_shared(node: Any) -> bool:
        if isinstance(node, _ARRAYS):
            return node.ndim > 0 and (len(node) != 1 or samples == 1)
        return _is_inner_list(batch, node) and len(node) == samples and _sizes(leaves(node)) != {samples}

    def part(node: Any) -> Any:
        mapped(lambda value: value, node, _only_movable)
        size = len(node)
        if size != samples and size % of:
            sizes = " and ".join(map(str, sorted({samples or size, *_sizes(leaves(batch))})))
            raise ValueError(f"{sizes} samples in its tensors: pass share(batch, number, of)")
        if size < of:
            raise ValueError(f"{size} {'sample' if size == 1 else 'samples'} for {of} shares: each needs one")
        mine = part_of(size, number, of)
        is_tensor = isinstance(node, torch.Tensor)
        return node.narrow(0, mine.start, len(mine)) if is_tensor else node[mine.start : mine.stop]

    return mapped(part, batch, is_leaf=is_shared)


def part_of(samples: int, number: int, of: int) -> range:
    """Return the samples of one of several parts; the first parts have one more if they do not divide."""
    begin = number * (samples // of) + min(number, samples % of)
    return range(begin, begin + samples // of + (number < samples % of))


def _only_movable(node: Any) -> Any:
    return node if callable(getattr(node, "to", None)) else _refuse(node)


def _refuse(node: Any) -> NoReturn:
    raise TypeError(
        f"contains a {type(node).__name__}, in which dcpbench finds no tensors: use dictionaries, lists, "
        "tuples or dataclasses of tensors and arrays, or pass share(batch, number, of)"
    )


def _is_inner_list(batch: Batch, node: Any) -> bool:
    return node is not batch and type(node) in (list, tuple)


def _sizes(nodes: Iterable[Any]) -> set[int]:
    """Return the numbers of samples that tensors and arrays have; 1 does not count if others have more."""
    sizes = {len(node) for node in nodes if isinstance(node, _ARRAYS) and node.ndim}
    return sizes - {1} or sizes
