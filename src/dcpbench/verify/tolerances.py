"""Tolerances, and comparisons of losses and of tensors that need only be close."""

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from dcpbench.core.mismatch import Mismatch, Problem
from dcpbench.verify.compare import distances, same_value, share_of
from dcpbench.verify.snapshot import Idle, Leaves, TensorLeaf

TOLERANCES = {"strict": 1e-6, "standard": 1e-4}
"""The largest difference that counts as close, as a fraction of the largest magnitude in the tensor. An
absolute tolerance would pass any second moments of 1e-8."""
_ROUNDINGS_OF_STATE, _ROUNDINGS_OF_LOSS = 8, 0.125
"""The same in roundings of the parameters' dtype, if that is larger. Each step rounds once more; a loss is a
mean of many elements. In bfloat16 these are 6.3e-2 and 9.8e-4."""


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


def far_tensors(expected: Leaves, actual: Leaves, tolerance: float) -> list[str]:
    """Return the names of tensors of which this rank's part is missing, has another shape, or differs by more
    than `tolerance` of the largest magnitude in the full tensor. The tolerance is larger if the dtype of the
    parameters is coarse, and 0 for integers and flags.

    Args:
        expected: live state, complete on every rank or in the same parts.
        actual: live state of which each rank has parts. An optimizer's entries for a parameter of which the
            rank has no element are ignored, because FSDP1 does not even count its steps.
    """
    full = {name: leaf for name, leaf in expected.items() if isinstance(leaf, TensorLeaf)}
    parts = {name: leaf for name, leaf in actual.items() if not isinstance(leaf, Idle)}
    coarsest = rounding(leaf.dtype for leaf in full.values() if leaf.kind == "param")
    far = []
    for name, leaf in full.items():
        part = parts.get(name)
        if part is None:
            is_far = not may_be_absent(name, actual)
        elif not isinstance(part, TensorLeaf) or part.extent.shape != leaf.extent.shape:
            is_far = True
        else:
            is_far = part.extent.numel > 0 and _is_far(leaf, part, _tolerance(leaf, tolerance, coarsest))
        far += [name] if is_far else []
    return far


def may_be_absent(name: str, actual: Leaves) -> bool:
    """Return whether a name is an optimizer's entry for a parameter of which this rank has no element."""
    return any(
        isinstance(leaf, TensorLeaf) and not leaf.extent.numel and name.startswith(f"state.{fqn}.")
        for fqn, leaf in actual.items()
    )


def _tolerance(leaf: TensorLeaf, tolerance: float, coarsest: float) -> float:
    """Return the tolerance of a tensor. Optimizers compute their scalars in the scalars' dtype, and
    everything else from the parameters."""
    if not (leaf.dtype.is_floating_point or leaf.dtype.is_complex):
        return 0.0
    if leaf.extent.shape:
        return max(tolerance, _ROUNDINGS_OF_STATE * max(coarsest, rounding([leaf.dtype])))
    return tolerance


def _is_far(full: TensorLeaf, part: TensorLeaf, tolerance: float) -> bool:
    same_part = full.extent == part.extent
    expected = full.local.reshape(-1) if same_part else part.extent.take(full.local)
    value = part.local.reshape(-1).to(full.local.device)
    same = (expected == value) | (expected.isnan() & value.isnan())  # also for two infinities
    distance = float(distances(expected, value).masked_fill(same, 0.0).max().item())
    return not distance <= tolerance * _magnitude(full.local)


def _magnitude(tensor: torch.Tensor) -> float:
    """Return the largest finite magnitude in a tensor."""
    if tensor.element_size() == 1 or not (tensor.is_floating_point() or tensor.is_complex()):
        tensor = tensor.double()  # for other dtypes `abs` is not defined, or can be negative
    return float(tensor.abs().nan_to_num(0.0, 0.0, 0.0).max().item())
