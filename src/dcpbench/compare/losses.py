"""Comparison of the losses of steps, bit for bit or within a tolerance, with its control."""

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from dcpbench.compare.leaves import relative_distance, same_value
from dcpbench.core.mismatch import Mismatch, Problem
from dcpbench.core.rank_report import Compared

TOLERANCES = {"strict": 1e-6, "standard": 1e-4}
"""The largest difference that counts as close, as a fraction of the largest magnitude in the tensor. An
absolute tolerance would pass any second moments of 1e-8."""
_ROUNDINGS_OF_LOSS = 0.125
"""The same in roundings of the parameters' dtype, if that is larger: a loss is a mean of many elements. In
bfloat16 it is 9.8e-4."""
_LOSS_EPS = 32 * torch.finfo(torch.float32).eps
"""Relative tolerance of a loss, the mean of many elements, in float32."""


def batch_loss_tolerance(dtypes: Iterable[torch.dtype]) -> float:
    """Return the relative tolerance of the ranks' loss, computed in these dtypes."""
    return loss_tolerance(_LOSS_EPS, dtypes)


def coarsest_eps(dtypes: Iterable[torch.dtype]) -> float:
    """Return the distance from 1 to the next number in the coarsest of these dtypes that can be trained
    in."""
    floats = (one for one in dtypes if (one.is_floating_point or one.is_complex) and one.itemsize > 1)
    return max((torch.finfo(one).eps for one in floats), default=0.0)


def loss_tolerance(tolerance: float, dtypes: Iterable[torch.dtype]) -> float:
    """Return the largest relative difference of losses that counts as close, for models with these dtypes."""
    return max(tolerance, _ROUNDINGS_OF_LOSS * coarsest_eps(dtypes))


def compare_losses(
    expected: list[float], actual: list[float], first: int, tolerance: float | None = None
) -> list[Mismatch]:
    """Return a mismatch for each step, from step `first` on, whose loss does not equal the expected one bit
    for bit or, with a `tolerance`, differs by more than that fraction of it. NaN equals NaN; the negative
    control detects that it proves nothing."""
    found = []
    for step, (one, other) in enumerate(itertools.zip_longest(expected, actual), start=first):
        distance = None if None in (one, other) else abs(one - other)  # only one of the runs took the step
        close = distance is not None and tolerance is not None and distance <= tolerance * abs(one)
        if close or same_value(one, other):
            continue
        problem = Problem.value if tolerance is None else Problem.far
        facts: dict[str, Any] = {"expected": repr(one), "actual": repr(other)}
        if other is not None and math.isnan(other):
            problem = Problem.nan
        elif distance is not None:
            facts["share"] = relative_distance(distance, abs(one))
        found.append(Mismatch(loss_name(step), problem, None, distance, facts))
    return found


def loss_name(step: int) -> str:
    """Return the name of a step's loss in mismatches and controls."""
    return f"loss of step {step}"


def compare_resumed(
    expected: list[float],
    losses: list[float],
    first: int,
    close: tuple[str, Iterable[torch.dtype]] | None,
    had_gradient: Sequence[bool],
    unrestored: list[float],
) -> Compared:
    """Compare losses from step `first` on with the uninterrupted run's, as `compare_losses`. The control is
    the losses of an unrestored model, from step 1 on, which must be reported.

    A loss can show a difference if it is finite and not zero, and there was a gradient (`had_gradient`). The
    losses of two models can be close at some steps by coincidence: there the loss of the unrestored model's
    step before must be reported.

    Args:
        close: the name of a tolerance and the dtypes of both runs, if the losses need only be close.
    """
    tolerance = loss_tolerance(TOLERANCES[close[0]], close[1]) if close else None
    usable = {
        loss_name(step): math.isfinite(loss) and loss != 0.0 and has_gradient
        for step, (loss, has_gradient) in enumerate(zip(losses, had_gradient, strict=False), first)
    }
    last = first + len(expected) - 1
    others = (unrestored[first - 1 - back : last - back] for back in (0, 1) if back < first)
    reported = {
        mismatch.name
        for other in others
        for mismatch in compare_losses(expected[: len(other)], other, first, tolerance)
    }
    detected = {name: is_usable and name in reported for name, is_usable in usable.items()}
    names = [loss_name(step) for step in range(first, last + 1)]
    return Compared(compare_losses(expected, losses, first, tolerance), dict.fromkeys(names, True), detected)
