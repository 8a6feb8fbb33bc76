"""Tolerances, and comparisons of losses."""

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from dcpbench.core.mismatch import Mismatch, Problem
from dcpbench.verify.compare import same_value, share_of
from dcpbench.verify.snapshot import Leaves, TensorLeaf

TOLERANCES = {"strict": 1e-6, "standard": 1e-4}
"""The largest difference that counts as close, as a fraction of the largest magnitude in the tensor. An
absolute tolerance would pass any second moments of 1e-8."""
_ROUNDINGS_OF_LOSS = 0.125
"""The same in roundings of the parameters' dtype, if that is larger: a loss is a mean of many elements. In
bfloat16 it is 9.8e-4."""


def rounding(dtypes: Iterable[torch.dtype]) -> float:
    """Return the distance from 1 to the next number in the coarsest of these dtypes that can be trained
    in."""
    floats = (one for one in dtypes if (one.is_floating_point or one.is_complex) and one.itemsize > 1)
    return max((torch.finfo(one).eps for one in floats), default=0.0)


def loss_tolerance(tolerance: float, dtypes: Iterable[torch.dtype]) -> float:
    """Return the largest relative difference of losses that counts as close, for models with these dtypes."""
    return max(tolerance, _ROUNDINGS_OF_LOSS * rounding(dtypes))


def losses_equal(expected: list[float], actual: list[float], first: int) -> list[Mismatch]:
    """Return a mismatch for each step, from step `first` on, whose loss does not equal the uninterrupted
    run's bit for bit."""
    return [
        _loss(step, Problem.value, one, other, distance)
        for step, one, other, distance in _by_step(expected, actual, first)
        if not same_value(one, other)
    ]


def losses_close(expected: list[float], actual: list[float], first: int, tolerance: float) -> list[Mismatch]:
    """Return a mismatch for each step, from step `first` on, whose loss differs by more than a fraction
    `tolerance` of the expected one. NaN equals NaN; the negative control detects that it proves nothing."""
    found = []
    for step, one, other, distance in _by_step(expected, actual, first):
        close = one is not None and distance is not None and distance <= tolerance * abs(one)
        if not close and not same_value(one, other):
            found.append(_loss(step, Problem.far, one, other, distance))
    return found


def _loss(
    step: str,
    problem: Problem,
    expected: float | None,
    actual: float | None,
    distance: float | None,
) -> Mismatch:
    facts: dict[str, Any] = {"expected": repr(expected), "actual": repr(actual)}
    if actual is not None and math.isnan(actual):
        return Mismatch(step, Problem.nan, None, distance, facts)
    if expected is not None and distance is not None:
        facts["share"] = share_of(distance, abs(expected))
    return Mismatch(step, problem, None, distance, facts)


def loss_name(step: int) -> str:
    """Return the name of a step's loss in mismatches and controls."""
    return f"loss of step {step}"


def _by_step(
    expected: list[float], actual: list[float], first: int
) -> Iterator[tuple[str, float | None, float | None, float | None]]:
    """Yield the name of each step, both losses and their distance; None if only the other run took the
    step."""
    for step, (one, other) in enumerate(itertools.zip_longest(expected, actual), start=first):
        yield loss_name(step), one, other, None if None in (one, other) else abs(one - other)


def may_be_absent(name: str, actual: Leaves) -> bool:
    """Return whether a name is an optimizer's entry for a parameter of which this rank has no element."""
    return any(
        isinstance(leaf, TensorLeaf) and not leaf.extent.numel and name.startswith(f"state.{fqn}.")
        for fqn, leaf in actual.items()
    )
