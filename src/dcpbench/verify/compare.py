"""Bit for bit: one rank's part of a state against another copy of it."""

import struct
from dataclasses import dataclass
from typing import Any

import torch

from dcpbench.verify.snapshot import Idle, Leaves, TensorLeaf

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Mismatch:
    """One piece of state that is not what it was."""

    name: str
    what: str
    max_abs_diff: float | None = None


def compare(saved: Leaves, restored: Leaves) -> list[Mismatch]:
    """Every name that differs, in the order of `saved`, then the names that only `restored` has."""
    found: list[Mismatch] = []
    for name, expected in saved.items():
        if name not in restored:
            if not isinstance(expected, Idle):
                found.append(Mismatch(name, "saved, but missing after the load"))
            continue
        actual = restored[name]
        if isinstance(expected, Idle) and isinstance(actual, Idle):
            expected, actual = expected.leaf, actual.leaf
        if isinstance(expected, TensorLeaf) and isinstance(actual, TensorLeaf):
            mismatch = _compare_tensors(name, expected, actual)
        else:
            mismatch = _compare_values(name, expected, actual)
        if mismatch:
            found.append(mismatch)
    found.extend(
        Mismatch(name, "there after the load, but never saved")
        for name, leaf in restored.items()
        if name not in saved and not isinstance(leaf, Idle)
    )
    return found


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's elements as integers of the same width, so that NaN equals NaN and 0.0 not -0.0.

    Shape (numel,), or (2 * numel,) for a complex dtype, whose parts are compared one by one.
    """
    flat = tensor.contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return flat.view(_BITS[flat.element_size()])


def same_value(expected: Any, actual: Any) -> bool:
    """Equality by type and value, floats by their bits, through lists, tuples and dictionaries."""
    if type(expected) is not type(actual):
        return False
    if isinstance(expected, torch.Tensor):
        return (
            expected.dtype == actual.dtype
            and expected.shape == actual.shape
            and torch.equal(bits(expected), bits(actual))
        )
    if isinstance(expected, float):
        return struct.pack("d", expected) == struct.pack("d", actual)
    if isinstance(expected, list | tuple):
        return len(expected) == len(actual) and all(
            same_value(one, other) for one, other in zip(expected, actual, strict=True)
        )
    if isinstance(expected, dict):
        return expected.keys() == actual.keys() and all(
            same_value(value, actual[key]) for key, value in expected.items()
        )
    return bool(expected == actual)


def _compare_tensors(name: str, expected: TensorLeaf, actual: TensorLeaf) -> Mismatch | None:
    for what, one, other in (
        ("dtype", expected.local.dtype, actual.local.dtype),
        ("global shape", expected.extent.shape, actual.extent.shape),
        ("placements", expected.placements, actual.placements),
        ("extent", expected.extent, actual.extent),
        ("local shape", tuple(expected.local.shape), tuple(actual.local.shape)),
    ):
        if one != other:
            return Mismatch(name, f"{what}: saved {one}, restored {other}")
    differs = bits(expected.local) != bits(actual.local)
    count = int(differs.sum().item())
    if not count:
        return None
    first = int(differs.to(torch.uint8).argmax().item())
    if expected.local.is_complex():
        first //= 2
    index = expected.extent.global_index(first)
    was = expected.local.reshape(-1)[first].item()
    became = actual.local.reshape(-1)[first].item()
    distance = _max_abs_diff(expected.local, actual.local)
    return Mismatch(
        name,
        f"index {index}: saved {was!r}, restored {became!r}; "
        f"{count} of {differs.numel()} elements differ, by at most {distance:.3g}",
        distance,
    )


def _max_abs_diff(one: torch.Tensor, other: torch.Tensor) -> float:
    wide = torch.complex128 if one.is_complex() else torch.float64
    return float((one.to(wide) - other.to(wide)).abs().max().item())


def _compare_values(name: str, expected: Any, actual: Any) -> Mismatch | None:
    if same_value(expected, actual):
        return None
    numbers = all(
        isinstance(value, int | float) and not isinstance(value, bool) for value in (expected, actual)
    )
    return Mismatch(
        name,
        f"saved {expected!r}, restored {actual!r}",
        abs(float(expected) - float(actual)) if numbers else None,
    )
