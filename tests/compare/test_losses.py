"""Losses are compared step by step, with and without a tolerance."""

import math

import pytest
import torch

from dcpbench.compare.losses import TOLERANCES, compare_losses, loss_tolerance
from dcpbench.core.mismatch import Problem

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("one", "other", "close", "equal"),
    [
        (1.0, 1.0, True, True),
        (1.0, 1.0 + 1e-5, True, False),
        (-1.0, -1.0 - 1e-5, True, False),
        (1.0, 1.001, False, False),
        (1e-8, 1.1e-8, False, False),
        (0.0, -0.0, True, False),
        (0.0, 1e-9, False, False),
        (NAN, NAN, True, True),
        (NAN, 1.0, False, False),
        (1.0, NAN, False, False),
        (INF, INF, True, True),
        (1.0, None, False, False),
        (None, 1.0, False, False),
        (None, NAN, False, False),
    ],
)
def test_losses_are_compared_step_by_step(
    one: float | None, other: float | None, close: bool, equal: bool
) -> None:
    """None is the loss of a step that a run did not take."""
    expected, actual = ([1.0] if loss is None else [1.0, loss] for loss in (one, other))
    distance = None if one is None or other is None else abs(one - other)
    for found, as_expected, problem in (
        (compare_losses(expected, actual, 7, 1e-4), close, Problem.far),
        (compare_losses(expected, actual, 7), equal, Problem.value),
    ):
        if as_expected:
            assert found == []
            continue
        (finding,) = found
        assert finding.name == "loss of step 8"
        assert finding.max_abs_diff == pytest.approx(distance, nan_ok=True)
        assert {repr(one), repr(other)} <= set(finding.facts.values())
        if other is not None and math.isnan(other):
            assert finding.problem is Problem.nan
            assert "share" not in finding.facts
            continue
        assert finding.problem is problem
        assert ("share" in finding.facts) is (distance is not None)
        if one and distance:
            assert finding.facts["share"] == pytest.approx(distance / abs(one), nan_ok=True)


def test_tolerances_are_the_documented_ones() -> None:
    """One in a million, and one in ten thousand."""
    for name, largest in (("strict", 1e-6), ("standard", 1e-4)):
        assert not compare_losses([1.0], [1 + 0.9 * largest], 1, TOLERANCES[name])
        assert compare_losses([1.0], [1 + 1.5 * largest], 1, TOLERANCES[name])


def test_loss_of_a_coarse_model_rounds_less() -> None:
    assert loss_tolerance(1e-4, [torch.float32]) == 1e-4
    assert loss_tolerance(1e-6, [torch.float32]) == 1e-6
    assert 5e-4 < loss_tolerance(1e-4, [torch.float32, torch.bfloat16]) < 1e-3
