"""What a cell is held against: the uninterrupted run, and an unwrapped twin on the same batches."""

import itertools
import math
from collections.abc import Iterator

from dcpbench.records.findings import Finding, Problem
from dcpbench.verify.compare import same_value
from dcpbench.verify.snapshot import Idle, Leaves, TensorLeaf

TOLERANCES = {"strict": 1e-6, "standard": 1e-4}
"""The largest difference that still counts as close, as a part of the largest magnitude in the
tensor. An absolute tolerance would pass anything on second moments of 1e-8."""


def losses_equal(expected: list[float], actual: list[float], first: int) -> list[Finding]:
    """Steps, the first of which is `first`, whose losses are not the uninterrupted run's bits."""
    return [
        Finding(step, Problem.value, None, distance, {"uninterrupted": repr(one), "resumed": repr(other)})
        for step, one, other, distance in _by_step(expected, actual, first)
        if not same_value(one, other)
    ]


def losses_close(
    expected: list[float], actual: list[float], first: int, tolerance: float, reference: str = "twin"
) -> list[Finding]:
    """Steps whose losses differ from the expected ones by more than `tolerance` of those. Not-a-number equals
    itself: that it proves nothing is for the negative control to say."""
    found = []
    for step, one, other, distance in _by_step(expected, actual, first):
        close = one is not None and distance is not None and distance <= tolerance * abs(one)
        if not close and not same_value(one, other):
            facts = {"reference": reference, "expected": repr(one), "actual": repr(other)}
            found.append(Finding(step, Problem.far, None, distance, facts))
    return found


def loss_name(step: int) -> str:
    """What a step's loss is called in a finding and in a control."""
    return f"loss of step {step}"


def _by_step(
    expected: list[float], actual: list[float], first: int
) -> Iterator[tuple[str, float | None, float | None, float | None]]:
    """Name, losses and their distance; None where the other run took more steps."""
    for step, (one, other) in enumerate(itertools.zip_longest(expected, actual), start=first):
        yield loss_name(step), one, other, None if None in (one, other) else abs(one - other)


def compare_close(twin: Leaves, actual: Leaves, tolerance: float) -> list[Finding]:
    """Tensors of which this rank's part differs from the twin's, at its place, by more than `tolerance`
    of the largest magnitude in the whole tensor.

    Args:
        twin: an unwrapped model's live state, all of it on every rank.
        actual: the live state of which each rank has parts. An optimizer's entries for a parameter of which
            it has no element say nothing: FSDP1 does not even count its steps.
    """
    found: list[Finding] = []
    whole = {name: leaf for name, leaf in twin.items() if isinstance(leaf, TensorLeaf)}
    parts = {name: leaf for name, leaf in actual.items() if not isinstance(leaf, Idle)}
    for name, expected in whole.items():
        part = parts.get(name)
        if part is None:
            if not _may_be_absent(name, actual):
                found.append(Finding(name, Problem.only_twin, expected.kind))
        elif not isinstance(part, TensorLeaf) or part.extent.shape != expected.extent.shape:
            here = part.extent.shape if isinstance(part, TensorLeaf) else type(part).__name__
            shapes = {"twin": expected.extent.shape, "here": here}
            found.append(Finding(name, Problem.shape, expected.kind, facts=shapes))
        elif part.extent.numel and (finding := _apart(name, expected, part, tolerance)):
            found.append(finding)
    found += [
        Finding(name, Problem.only_parallel, leaf.kind)
        for name, leaf in parts.items()
        if isinstance(leaf, TensorLeaf) and name not in whole
    ]
    return found


def _may_be_absent(name: str, actual: Leaves) -> bool:
    """Whether a name is an optimizer's entry for a parameter of which this rank holds no element."""
    return any(
        isinstance(leaf, TensorLeaf) and not leaf.extent.numel and name.startswith(f"state.{fqn}.")
        for fqn, leaf in actual.items()
    )


def _apart(name: str, twin: TensorLeaf, part: TensorLeaf, tolerance: float) -> Finding | None:
    expected = part.extent.take(twin.local).double()
    value = part.local.reshape(-1).to(expected)
    both_nan = expected.isnan() & value.isnan()
    distance = float((expected - value).abs().masked_fill(both_nan, 0.0).max().item())
    scale = float(twin.local.nan_to_num(0.0, 0.0, 0.0).abs().max().item())
    if distance <= tolerance * scale:
        return None
    share = distance / scale if scale else math.inf
    return Finding(name, Problem.far, part.kind, distance, {"share": share})
