"""Bitwise comparison of one rank's part of a state with a snapshot."""

import inspect
import io
import itertools
import math
import struct
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Any

import numpy as np
import torch

from dcpbench.core.mismatch import AS_STORED, Mismatch, Problem
from dcpbench.core.rank_report import Compared
from dcpbench.core.state import Name, names_with_texts, text_of
from dcpbench.state.digest import add
from dcpbench.state.layout import Extent
from dcpbench.state.snapshot import (
    SCALARS,
    DigestedLeaf,
    EmptyShard,
    Leaf,
    Leaves,
    TensorLeaf,
    block_digests,
    content_digest,
    has_content,
    is_composite,
    kind_of,
    names_parameters,
)

SMALL_BYTES = 2**14
"""Tensors of at most this size are compared together."""
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

TensorReader = Callable[[Name], torch.Tensor | None]
"""Reads a full tensor from a checkpoint by the name of its leaf, to the CPU; None if there is none."""


class Absence(Enum):
    """The leaf of a name that must be absent; a copy of it in another process is the same object."""

    ABSENT_LEAF = "absent"


ABSENT_LEAF = Absence.ABSENT_LEAF


def compare(
    saved: Leaves, restored: Leaves, read_saved: TensorReader | None = None, closely: bool = True
) -> list[Mismatch]:
    """Return a mismatch for each name that differs, in the order of `saved`, then for each name that only
    `restored` has.

    Args:
        read_saved: reads a tensor from the checkpoint if only its digest was kept.
        closely: False for a control, which needs only the names.
    """
    return [*differences_by_name(saved, restored, read_saved, closely).values()]


def differences_by_name(
    saved: Leaves, restored: Leaves, read_saved: TensorReader | None = None, closely: bool = True
) -> dict[Name, Mismatch]:
    """Return the same by name."""
    mismatches: dict[Name, Mismatch] = {}
    same = equal_together(_like_pairs(saved, restored))
    for name, leaf in saved.items():
        if name in restored:
            actual = restored[name]
            if same.get(name) or (leaf is actual and type(leaf) in SCALARS):
                continue
            if type(leaf) is type(actual) and type(leaf) in SCALARS and leaf and leaf == actual:
                continue  # zeros can differ in their sign
            if name in same and not closely:
                mismatches[name] = Mismatch(text_of(name), Problem.differs, leaf.kind)
            elif mismatch := _compare_leaves(name, leaf, actual, read_saved, closely):
                mismatches[name] = mismatch
        elif not isinstance(leaf, EmptyShard):
            mismatches[name] = Mismatch(text_of(name), Problem.missing, kind_of(name, leaf))
    for name, leaf in restored.items():
        if name not in saved and not isinstance(leaf, EmptyShard):
            mismatches[name] = Mismatch(text_of(name), Problem.unexpected, kind_of(name, leaf))
    return mismatches


def _like_pairs(saved: Leaves, restored: Leaves) -> Iterator[tuple[Name, torch.Tensor, torch.Tensor]]:
    """Yield the tensors that can differ in nothing but their elements."""
    for name, expected in saved.items():
        actual = restored.get(name)
        if (
            type(expected) is TensorLeaf
            and type(actual) is TensorLeaf
            and expected.placements == actual.placements
            and (expected.extent is actual.extent or expected.extent == actual.extent)
        ):
            yield name, expected.local, actual.local


def equal_together(pairs: Iterable[tuple[Name, torch.Tensor, torch.Tensor]]) -> dict[Name, bool]:
    """Return whether pairs of small tensors have the same bits, by name: one comparison of all their bytes,
    which costs as much as that of two tensors. Pairs that differ in dtype, shape or device are left out."""
    devices: dict[torch.device, _Pairs] = {}
    for name, expected_bytes, actual_bytes in pairs:
        alike = (
            expected_bytes.dtype is actual_bytes.dtype
            and expected_bytes.shape == actual_bytes.shape
            and expected_bytes.device == actual_bytes.device
        )
        if alike and expected_bytes.nbytes <= SMALL_BYTES:
            if expected_bytes.device not in devices:
                devices[expected_bytes.device] = defaultdict(list)
            devices[expected_bytes.device][expected_bytes.dtype].append((name, expected_bytes, actual_bytes))
    same: dict[Name, bool] = {}
    for of_dtypes in devices.values():
        expected_bytes, actual_bytes = (_bytes(of_dtypes, side) for side in (1, 2))
        group = [pair for of_dtype in of_dtypes.values() for pair in of_dtype]
        same |= {name: True for name, *_ in group}
        if not torch.equal(expected_bytes, actual_bytes):
            counts = (expected_bytes != actual_bytes).cumsum(0, dtype=torch.int32)
            counts = torch.cat([counts.new_zeros(1), counts])
            ends = [0, *itertools.accumulate(tensor.nbytes for _, tensor, _ in group)]
            until = counts[ends].tolist()
            same |= {pair[0]: until[number] == until[number + 1] for number, pair in enumerate(group)}
    return same


_Pairs = dict[torch.dtype, list[tuple[Any, Any, Any]]]


def _bytes(pairs: _Pairs, side: int) -> torch.Tensor:
    """Return the bytes of the first (1) or the second (2) tensors of pairs; a concatenation keeps them."""
    of_dtypes = [[pair[side].reshape(-1) for pair in of_dtype] for of_dtype in pairs.values()]
    return torch.cat([torch.cat(tensors).view(torch.uint8) for tensors in of_dtypes])


def same_leaves(expected: Leaves, actual: Leaves) -> set[Name]:
    """Return the names of the leaves that equal the expected ones; if a digest is expected, by content.
    A name whose leaf is expected to be `ABSENT` must be missing."""
    same = equal_together(_like_pairs(expected, actual))
    return {
        name
        for name, leaf in expected.items()
        if same.get(name) or (name not in same and same_leaf(name, leaf, actual.get(name, ABSENT_LEAF)))
    }


def same_leaf(name: Name, expected: Leaf, actual: Leaf) -> bool:
    """Return whether a leaf equals the expected one, as `same_leaves` does."""
    if expected is ABSENT_LEAF or actual is ABSENT_LEAF:
        return expected is actual
    if isinstance(expected, DigestedLeaf):
        same_dtype = expected.dtype == getattr(actual, "dtype", None)
        return same_dtype and content_digest(expected) == content_digest(actual)
    return _compare_leaves(name, expected, actual, None, closely=False) is None


@dataclass(frozen=True)
class Comparison:
    """A comparison, which can be asked again with another expectation.

    Args:
        expected: what was expected, by name, flattened key or FQN.
        actual: what there is, by the same.
        compared: the mismatches, and the negative control.
        how: takes a name, what is expected and what there is, or `ABSENT`; returns whether they are equal.
    """

    expected: Mapping[Any, Any]
    actual: Mapping[Any, Any]
    compared: Compared
    how: Callable[[Any, Any, Any], bool] = same_leaf

    @property
    def wrong(self) -> frozenset[Any]:
        """The names of this rank's mismatches."""
        texts = {mismatch.name for mismatch in self.compared.found}
        return frozenset(names_with_texts({**self.expected, **self.actual}, texts))

    def names_equal_to(self, expected: Mapping[Any, Any]) -> set[Any]:
        """Return the names of mismatches under which there is what another expectation says."""
        names = self.wrong & expected.keys()
        return {name for name in names if self.how(name, expected[name], self.actual.get(name, ABSENT_LEAF))}

    def attributed(self, by: str, names: Iterable[Any]) -> "Comparison":
        """Return the comparison with a defect as the cause of the mismatches of some names."""
        texts = {text_of(name) for name in names}
        mismatches = [
            replace(mismatch, by=by) if mismatch.name in texts else mismatch
            for mismatch in self.compared.found
        ]
        return replace(self, compared=replace(self.compared, found=mismatches))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements as integers of the same width, so that NaN equals NaN, and 0.0 differs from -0.0.

    The shape is (numel,), or (2 * numel,) for a complex dtype.
    """
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.reshape(-1).view(BITS[tensor.itemsize])


def distances(expected: torch.Tensor, actual: torch.Tensor) -> torch.Tensor:
    """Return the absolute difference of each element, in float64; exact for integers that are close."""
    if expected.is_complex():
        return (expected.to(torch.complex128) - actual.to(torch.complex128)).abs()
    far = (expected.double() - actual.double()).abs()
    if expected.is_floating_point():
        return far
    return torch.where(far < 2**53, (expected.to(torch.int64) - actual.to(torch.int64)).abs().double(), far)


def same_value(expected: Any, actual: Any) -> bool:
    """Return whether two values have the same type and value, floats the same bits. Lists, tuples and
    dictionaries are compared recursively, and objects whose class defines no equality by their attributes."""
    if type(expected) is not type(actual):
        return False
    if type(expected) in SCALARS and type(expected) is not float:
        return bool(expected == actual)
    if isinstance(expected, torch.Tensor):
        if is_composite(expected):
            same_type = (expected.dtype, expected.layout) == (actual.dtype, actual.layout)
            return same_type and same_value(*map(_inner_tensors, (expected, actual)))
        same_type = expected.dtype == actual.dtype and expected.shape == actual.shape
        return same_type and torch.equal(bits(expected), bits(actual.to(expected.device)))
    if isinstance(expected, np.ndarray):
        same_type = expected.dtype == actual.dtype and expected.shape == actual.shape
        return same_type and same_value(
            *(array.tolist() if array.dtype.hasobject else array.tobytes() for array in (expected, actual))
        )
    if isinstance(expected, float):
        return struct.pack("d", expected) == struct.pack("d", actual)
    if isinstance(expected, list | tuple):
        return len(expected) == len(actual) and all(map(same_value, expected, actual))
    if isinstance(expected, Mapping):
        return expected.keys() == actual.keys() and all(
            same_value(element, actual[key]) for key, element in expected.items()
        )
    if isinstance(expected, io.BytesIO):
        return bool(expected.getvalue() == actual.getvalue())
    if isinstance(expected, partial):
        expected_call, actual_call = ((call.func, call.args, call.keywords) for call in (expected, actual))
        return same_value(expected_call, actual_call)
    has_equality = getattr(type(expected), "__eq__", None) is not object.__eq__
    if has_equality or not hasattr(expected, "__dict__") or inspect.isroutine(expected):
        return bool(expected == actual)
    return expected is actual or same_value(vars(expected), vars(actual))


def _inner_tensors(tensor: Any) -> Any:
    """Return the tensors that a nested or sparse tensor, or one of a subclass, consists of."""
    if tensor.is_nested:
        return tensor.unbind()
    if tensor.layout is torch.strided:
        return {name: getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]}
    tensor = tensor.to_sparse().coalesce()
    return [tensor.shape, tensor.indices(), tensor.values()]


def _compare_leaves(
    name: Name, expected: Leaf, actual: Leaf, read_saved: TensorReader | None, closely: bool
) -> Mismatch | None:
    if type(expected) in SCALARS and same_value(expected, actual):
        return None
    if isinstance(expected, EmptyShard) and isinstance(actual, EmptyShard):
        expected, actual = expected.leaf, actual.leaf
    if isinstance(expected, TensorLeaf | DigestedLeaf) and isinstance(actual, TensorLeaf | DigestedLeaf):
        return _compare_tensors(name, expected, actual, read_saved, closely)
    if same_value(expected, actual):
        return None
    if names_parameters(name, expected) and same_value(
        sorted_parameters(expected), sorted_parameters(actual)
    ):
        return None
    if not closely:
        return Mismatch(text_of(name), Problem.value)
    facts = {"expected": repr(expected), "actual": repr(actual)}
    return Mismatch(text_of(name), Problem.value, kind_of(name, expected), _distance(expected, actual), facts)


def sorted_parameters(names: Any) -> Any:
    """Return the names of a group's parameters, sorted. A group built from a set has another order in each
    process, and a load finds parameters by their names."""
    return sorted(names, key=repr) if isinstance(names, list) else names


def _compare_tensors(
    name: Name,
    expected: TensorLeaf | DigestedLeaf,
    actual: Leaf,
    read_saved: TensorReader | None,
    closely: bool,
) -> Mismatch | None:
    for problem, before, after in (
        (Problem.dtype, expected.dtype, actual.dtype),
        (Problem.shape, expected.extent.shape, actual.extent.shape),
        (Problem.placements, expected.placements, actual.placements),
        (Problem.extent, expected.extent, actual.extent),
    ):
        if before != after:
            facts = {"expected": str(before), "actual": str(after)}
            return Mismatch(text_of(name), problem, expected.kind, facts=facts)
    if isinstance(expected, DigestedLeaf):
        return _compare_digests(name, expected, actual, read_saved)
    if expected.local.shape != actual.local.shape:
        shapes = {"expected": tuple(expected.local.shape), "actual": tuple(actual.local.shape)}
        return Mismatch(text_of(name), Problem.local_shape, expected.kind, facts=shapes)
    return compare_elements(name, expected.kind, expected.extent, expected.local, actual.local, closely)


def compare_elements(
    name: Name,
    kind: str,
    extent: Extent,
    expected: torch.Tensor,
    actual: torch.Tensor,
    closely: bool = True,
) -> Mismatch | None:
    """Return where two copies of one part differ, and by how much; None if they have the same bits."""
    if actual.device != expected.device:
        actual = actual.to(expected.device)  # a load moves tensors that an optimizer kept on the CPU
    if torch.equal(bits(expected), bits(actual)):
        return None
    if not closely:
        return Mismatch(text_of(name), Problem.differs, kind)
    expected, actual = expected.reshape(-1), actual.reshape(-1)
    differs = bits(expected) != bits(actual)
    if expected.is_complex():
        differs = differs.reshape(-1, 2).any(dim=1)
    first = int(differs.to(torch.uint8).argmax().item())
    was, became = expected[first], actual[first]
    facts = {
        "index": extent.global_index(first),
        "expected": repr(was.item()),
        "actual": repr(became.item()),
        "expected_bits": _hexadecimal(was),
        "actual_bits": _hexadecimal(became),
        "differing": int(differs.sum().item()),
        "elements": differs.numel(),
    }
    distance = float(distances(expected, actual).max().item())
    size, other_size = (distances(tensor, torch.zeros_like(tensor)) for tensor in (expected, actual))
    if bool((other_size.isnan() & ~size.isnan()).any()):
        return Mismatch(text_of(name), Problem.nan, kind, distance, facts)
    facts["share"] = relative_distance(distance, float(size.max().item()))
    return Mismatch(text_of(name), Problem.differs, kind, distance, facts)


def relative_distance(distance: float, magnitude: float) -> float:
    """Return a distance as a fraction of a magnitude."""
    return distance / magnitude if magnitude else math.inf


def _compare_digests(
    name: Name, expected: DigestedLeaf, actual: Leaf, read_saved: TensorReader | None
) -> Mismatch | None:
    blocks = actual.blocks if isinstance(actual, DigestedLeaf) else block_digests([actual])[0]
    if isinstance(actual, TensorLeaf) and len(expected.blocks) == 1:  # also of several: see `digests`
        blocks = (add(*blocks),)
    pairs = zip(expected.blocks, blocks, strict=True)
    differing = [number for number, (before, after) in enumerate(pairs) if before != after]
    if not differing:
        return None
    mismatch = Mismatch(text_of(name), Problem.digests_differ, expected.kind)
    if isinstance(actual, DigestedLeaf):
        return mismatch
    first, last = expected.block_ends(differing[0])
    facts = {"differing": len(differing), "blocks": len(blocks), "first": first, "last": last}
    return with_location(name, replace(mismatch, facts=facts), expected, actual, read_saved)


def with_location(
    name: Name,
    mismatch: Mismatch,
    expected: DigestedLeaf,
    actual: Leaf | None,
    read_saved: TensorReader | None,
) -> Mismatch | None:
    """Replace a mismatch of digests by one of elements, if the checkpoint still has the expected content;
    None if this rank's part does not differ from it. If the checkpoint has other content, return the mismatch
    of digests, with `by` if this rank's part equals the checkpoint's."""
    stored = read_saved(name) if read_saved else None
    if stored is None:
        return mismatch
    by = None
    if (tuple(stored.shape), stored.dtype) == (expected.extent.shape, expected.dtype):
        here = None
        if isinstance(actual, TensorLeaf):
            stored_part = actual.extent.take(stored).to(actual.local.device)
            here = compare_elements(name, expected.kind, actual.extent, stored_part, actual.local)
        if has_content(expected, stored):
            return here
        by = None if here else AS_STORED
    return replace(mismatch, facts={**mismatch.facts, "checkpoint_differs": True}, by=by)


def saved_part(saved: Leaves, name: Name, extent: Extent, read_saved: TensorReader) -> torch.Tensor | None:
    """Return the part of a saved tensor that has this extent. If another part was kept, or only a digest, it
    is that of the checkpoint, which need not be the same."""
    leaf = saved.get(name)
    if isinstance(leaf, TensorLeaf) and leaf.extent == extent:
        return leaf.local
    if not isinstance(leaf, TensorLeaf | DigestedLeaf):
        return None
    full = read_saved(name)
    return extent.take(full) if full is not None and tuple(full.shape) == leaf.extent.shape else None


def _hexadecimal(element: torch.Tensor) -> str:
    """Return the bits of an element, the highest first."""
    raw = element.reshape(1).contiguous().view(torch.uint8).tolist()
    return "0x" + bytes(reversed(raw)).hex()


def _distance(expected: Any, actual: Any) -> float | None:
    if not all(
        isinstance(number, int | float) and not isinstance(number, bool) for number in (expected, actual)
    ):
        return None
    distance = abs(float(expected) - float(actual))
    return None if math.isnan(distance) else distance
