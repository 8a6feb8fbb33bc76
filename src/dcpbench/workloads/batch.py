"""The structure of a batch, and how ranks share one.

A batch is a pytree: tensors, NumPy arrays, texts and numbers in dictionaries, lists, tuples, dataclasses and
whatever else torch's pytrees know. Tensors in another container would not reach the device, and each rank
would train on all of them. So it is refused, unless the workload shares its batches itself.
"""

import copy
import numbers
import textwrap
from collections import UserDict
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from pathlib import PurePath
from types import ModuleType
from typing import Any, NoReturn

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from dcpbench.state.snapshot import is_composite
from dcpbench.torch_private import PYTREE

Batch = Any
"""A pytree."""
Share = Callable[[Batch, int, int], Batch]
"""`share(batch, number, of)` returns the part of a batch for one of several ranks, numbered from 0."""

_PLAIN = (str, bytes, numbers.Number, np.generic, type(None), Enum, PurePath, torch.dtype, torch.device)
"""Values in which there is nothing to share."""
_pytree = PYTREE.value
_ARRAYS = (torch.Tensor, np.ndarray)


def map_tensors(
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
        if type(node) is tuple:  # the usual one: pytrees take ten times as long
            return tuple([changed(inner) for inner in node])
        if not (isinstance(node, PackedSequence) or _pytree.tree_is_leaf(node)):
            return _pytree.tree_map(changed, node, is_leaf=lambda inner: inner is not node)
        if isinstance(node, dict | UserDict):
            copied = copy.copy(node)
            for name, node_inside in node.items():
                copied[name] = changed(node_inside)
                if getattr(copied, "__dict__", {}).get(name) is node_inside:  # it is an attribute too
                    object.__setattr__(copied, name, copied[name])
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

    return map_tensors(moved, batch, moved)


def leaves_of_batch(batch: Batch) -> list[Any]:
    """Return everything that is no container, in order; of unknown objects the tensors and arrays in them."""
    content_leaves, visited = list[Any](), dict[int, Any]()

    def visit(node: Any) -> None:
        if id(node) not in visited and not isinstance(node, ModuleType):
            visited[id(node)] = node  # objects can contain each other
            content = [*node] if isinstance(node, PackedSequence) else object.__getstate__(node)
            map_tensors(content_leaves.append, content, visit)

    map_tensors(content_leaves.append, batch, visit, lambda node: isinstance(node, (*_PLAIN, *_ARRAYS)))
    return content_leaves


def samples_of(batch: Batch) -> int | None:
    """Return the number of samples; 0 if everything is for all, None if the shapes do not show it."""
    if any(isinstance(leaf, torch.Tensor) and is_composite(leaf) for leaf in leaves_of_batch(batch)):
        return None
    if _is_of_containers(batch):
        return len(batch) if any(_rows(container) != _rows(batch[0]) for container in batch) else None
    nodes: list[Any] = []
    map_tensors(nodes.append, batch, lambda node: None, partial(_is_divisible, batch))
    rows = _rows(tuple(node for node in nodes if isinstance(node, _ARRAYS)))
    rows = rows - {1} or rows
    samples = next(iter(rows), 0)
    for node in nodes:
        if isinstance(node, list | tuple) and node:
            inner = _rows(node) - {1}
            # A list of as many tensors with as many rows can be one of samples, or of parts of all samples.
            if inner == {samples} if len(node) == samples else inner or not samples:
                return None
    return samples if len(rows) <= 1 else None


def share_of(batch: Batch, number: int, of: int) -> Batch:
    """Return one of several parts of the samples; the first ones have one more if they do not divide.

    Samples are along the first dimension of tensors and arrays, which must agree on it; one of 1 is for all.
    A list or tuple within the batch with as many items is divided by its items, and so is a list of
    containers that differ in their first dimensions. The rest is for all.

    Raises:
        ValueError: there are fewer samples than parts, or the shapes do not show what a sample is.
        TypeError: dcpbench cannot find the tensors.
    """
    map_tensors(lambda value: value, batch, _only_movable)
    if of == 1:
        return batch
    samples = samples_of(batch)
    arrays = [leaf for leaf in leaves_of_batch(batch) if isinstance(leaf, _ARRAYS)]
    texts = ["nested" if getattr(array, "is_nested", False) else str(tuple(array.shape)) for array in arrays]
    shapes = textwrap.shorten(", ".join(dict.fromkeys(texts)), 150, placeholder=" …")
    if samples is None:
        raise ValueError(f"shapes {shapes} do not show what a sample is: pass share(batch, number, of)")
    if 0 < samples < of:
        count = f"{samples} {'sample' if samples == 1 else 'samples'}"
        raise ValueError(f"{count} for {of} shares: each needs one; shapes {shapes}")
    begin = sum(size_of_share(samples, before, of) for before in range(number))
    end = begin + size_of_share(samples, number, of)

    def is_shared(node: Any) -> bool:
        return _is_divisible(batch, node) and getattr(node, "ndim", 1) > 0 and len(node) == samples

    return map_tensors(lambda node: node[begin:end], batch, is_leaf=is_shared)


def size_of_share(samples: int, number: int, of: int) -> int:
    """Return the number of samples in one of several parts of the samples."""
    return samples // of + (number < samples % of)


def _only_movable(node: Any) -> Any:
    return node if callable(getattr(node, "to", None)) else _refuse(node)


def _refuse(node: Any) -> NoReturn:
    raise TypeError(
        f"contains a {type(node).__name__}, in which dcpbench finds no tensors: use dictionaries, lists, "
        "tuples or dataclasses of tensors and arrays, or pass share(batch, number, of)"
    )


def _is_of_containers(batch: Batch) -> bool:
    """Return whether a batch is a list of containers that have a key in common: samples, or parts of all."""
    known = (*_PLAIN, *_ARRAYS)
    if not isinstance(batch, list) or any(isinstance(container, known) for container in batch):
        return False
    keys = [{*container} if isinstance(container, dict | UserDict) else {0} for container in batch]
    return bool(keys and set.intersection(*keys))


def _is_divisible(batch: Batch, node: Any) -> bool:
    """Return whether a node of a batch is a tensor, an array or a list, and no structure at the top."""
    if node is batch and isinstance(node, list):
        return _is_of_containers(batch) or all(isinstance(element, _PLAIN) for element in batch)
    is_list = node is not batch and (isinstance(node, list) or type(node) is tuple)
    return is_list or isinstance(node, _ARRAYS)


def _rows(batch: Batch) -> set[int]:
    """Return the first dimensions of all tensors and arrays."""
    return {len(leaf) for leaf in leaves_of_batch(batch) if isinstance(leaf, _ARRAYS) and leaf.ndim}
