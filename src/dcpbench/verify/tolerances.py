"""What a cell is held against: the uninterrupted run, and an unwrapped twin on the same batches."""

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from dcpbench.core.mismatch import Mismatch, Problem
from dcpbench.verify.compare import distances, same_value, share_of
from dcpbench.verify.snapshot import Idle, Leaves, TensorLeaf

TOLERANCES = {"strict": 1e-6, "standard": 1e-4}
"""The largest difference that still counts as close, as a part of the largest magnitude in the
tensor. An absolute tolerance would pass anything on second moments of 1e-8."""
_ROUNDINGS_OF_STATE, _ROUNDINGS_OF_LOSS = 8, 0.125
"""How many roundings of its parameters' dtype a parallel model may be away from its twin, where that is more:
each step rounds once more, and a loss is a mean of many elements. In bfloat16 6.3e-2 and 9.8e-4."""


def rounding(dtypes: Iterable[torch.dtype]) -> float:
    """The distance from 1 to the next number in the coarsest of these dtypes that one can train in."""
    floats = (one for one in dtypes if (one.is_floating_point or one.is_complex) and one.itemsize > 1)
    return max((torch.finfo(one).eps for one in floats), default=0.0)


def loss_tolerance(tolerance: float, dtypes: Iterable[torch.dtype]) -> float:
    """The largest relative difference of two losses that still counts as close, of models that compute in
    these dtypes."""
    return max(tolerance, _ROUNDINGS_OF_LOSS * rounding(dtypes))


def losses_equal(expected: list[float], actual: list[float], first: int) -> list[Mismatch]:
    """Steps, the first of which is `first`, whose losses are not the uninterrupted run's bits."""
    return [
        _loss(step, Problem.value, one, other, distance, {"uninterrupted": repr(one), "resumed": repr(other)})
        for step, one, other, distance in _by_step(expected, actual, first)
        if not same_value(one, other)
    ]


def losses_close(
    expected: list[float], actual: list[float], first: int, tolerance: float, reference: str = "twin"
) -> list[Mismatch]:
    """Steps whose losses differ from the expected ones by more than `tolerance` of those. Not-a-number equals
    itself: that it proves nothing is for the negative control to say."""
    found = []
    for step, one, other, distance in _by_step(expected, actual, first):
        close = one is not None and distance is not None and distance <= tolerance * abs(one)
        if not close and not same_value(one, other):
            facts = {"reference": reference, "expected": repr(one), "actual": repr(other)}
            found.append(_loss(step, Problem.far, one, other, distance, facts))
    return found


def _loss(
    step: str,
    problem: Problem,
    expected: float | None,
    actual: float | None,
    distance: float | None,
    facts: dict[str, Any],
) -> Mismatch:
    if actual is not None and math.isnan(actual):
        return Mismatch(step, Problem.nan, None, distance, facts)
    if expected is not None and distance is not None:
        facts["share"] = share_of(distance, abs(expected))
    return Mismatch(step, problem, None, distance, facts)


def loss_name(step: int) -> str:
    """What a step's loss is called in a finding and in a control."""
    return f"loss of step {step}"


def _by_step(
    expected: list[float], actual: list[float], first: int
) -> Iterator[tuple[str, float | None, float | None, float | None]]:
    """Name, losses and their distance; None where the other run took more steps."""
    for step, (one, other) in enumerate(itertools.zip_longest(expected, actual), start=first):
        yield loss_name(step), one, other, None if None in (one, other) else abs(one - other)


def compare_close(
    twin: Leaves, actual: Leaves, tolerance: float, computes_in: Iterable[torch.dtype] = ()
) -> list[Mismatch]:
    """Tensors of which this rank's part differs from the twin's, at its place, by more than `tolerance`
    of the largest magnitude in the whole tensor: more where the parameters' dtype is coarse, nothing where
    there is no rounding, in integers and flags.

    Args:
        twin: an unwrapped model's live state, all of it on every rank.
        actual: the live state of which each rank has parts. An optimizer's entries for a parameter of which
            it has no element say nothing: FSDP1 does not even count its steps.
        computes_in: dtypes that one of them computes in beside those of its parameters.
    """
    found: list[Mismatch] = []
    whole = {name: leaf for name, leaf in twin.items() if isinstance(leaf, TensorLeaf)}
    parts = {name: leaf for name, leaf in actual.items() if not isinstance(leaf, Idle)}
    coarsest = rounding([*computes_in, *(leaf.dtype for leaf in whole.values() if leaf.kind == "param")])
    for name, expected in whole.items():
        part = parts.get(name)
        if part is None:
            if not may_be_absent(name, actual):
                found.append(Mismatch(name, Problem.only_twin, expected.kind))
        elif not isinstance(part, TensorLeaf) or part.extent.shape != expected.extent.shape:
            here = part.extent.shape if isinstance(part, TensorLeaf) else type(part).__name__
            shapes = {"twin": expected.extent.shape, "here": here}
            found.append(Mismatch(name, Problem.shape, expected.kind, facts=shapes))
        elif part.extent.numel and (
            finding := _apart(name, expected, part, _tolerance(expected, tolerance, coarsest))
        ):
            found.append(finding)
    found += [
        Mismatch(name, Problem.only_parallel, leaf.kind)
        for name, leaf in parts.items()
        if isinstance(leaf, TensorLeaf) and name not in whole
    ]
    return found


def may_be_absent(name: str, actual: Leaves) -> bool:
    """Whether a name is an optimizer's entry for a parameter of which this rank holds no element."""
    return any(
        isinstance(leaf, TensorLeaf) and not leaf.extent.numel and name.startswith(f"state.{fqn}.")
        for fqn, leaf in actual.items()
    )


def _tolerance(leaf: TensorLeaf, tolerance: float, coarsest: float) -> float:
    """Of one tensor: an optimizer's scalars are computed in their own dtype, all else from the parameters."""
    if not (leaf.dtype.is_floating_point or leaf.dtype.is_complex):
        return 0.0
    if leaf.extent.shape:
        return max(tolerance, _ROUNDINGS_OF_STATE * max(coarsest, rounding([leaf.dtype])))
    return tolerance


def _apart(name: str, twin: TensorLeaf, part: TensorLeaf, tolerance: float) -> Mismatch | None:
    expected, value = part.extent.take(twin.local), part.local.reshape(-1).to(twin.local.device)
    alike = (expected == value) | (expected.isnan() & value.isnan())  # also two infinities
    distance = float(distances(expected, value).masked_fill(alike, 0.0).max().item())
    scale = _magnitude(twin.local)
    if distance <= tolerance * scale:
        return None
    problem = Problem.nan if math.isnan(distance) else Problem.far
    return Mismatch(name, problem, part.kind, distance, {"share": share_of(distance, scale)})


def _magnitude(tensor: torch.Tensor) -> float:
    """The largest finite magnitude in a tensor."""
    if tensor.element_size() == 1 or not (tensor.is_floating_point() or tensor.is_complex()):
        tensor = tensor.double()  # of the others `abs` is not defined, or may be negative
    return float(tensor.abs().nan_to_num(0.0, 0.0, 0.0).max().item())
