"""Steps in series of costs: found where they are, and hardly any where nothing changed."""

from collections.abc import Callable

import numpy as np
import pytest

from dcpbench.analysis.change_points import FALSE_ALARMS, LEAST_SIDE, find_change_points


def normal(random: np.random.Generator, size: tuple[int, int]) -> np.ndarray:
    return random.normal(size=size)


def heavy(random: np.random.Generator, size: tuple[int, int]) -> np.ndarray:
    return random.standard_t(3, size)


def moody(random: np.random.Generator, size: tuple[int, int]) -> np.ndarray:
    """A night is like the one before."""
    drawn = random.normal(size=size)
    for number in range(1, size[1]):
        drawn[:, number] = 0.3 * drawn[:, number - 1] + 0.954 * drawn[:, number]
    return drawn


NOTHING_CHANGED = [
    (*shape, noise)
    for shape in ((1, 10, 0), (1, 30, 0.1), (60, 30, 0), (9, 200, 0.2))
    for noise in (normal, heavy, moody)
]


@pytest.mark.parametrize(("series", "sweeps", "missing", "noise"), NOTHING_CHANGED)
def test_unchanged_histories_are_short(
    series: int, sweeps: int, missing: float, noise: Callable[..., np.ndarray]
) -> None:
    """So seldom over all series together, whatever the noise is like."""
    random, alarms, times = np.random.default_rng(5), 0, 300
    for _ in range(times):
        values = np.exp(0.1 * noise(random, (series, sweeps)))
        values[random.random(values.shape) < missing] = np.nan
        alarms += any(find_change_points(values))
    assert alarms / times <= FALSE_ALARMS + 2 * np.sqrt(FALSE_ALARMS / times)


@pytest.mark.parametrize("at", [10, 15, 20])
def test_steps_are_found_at_their_place(at: int) -> None:
    """10 % at 3 % noise over 30 sweeps, in one of 60 series: in 90 of 100 histories, and not elsewhere."""
    random, found, within, elsewhere = np.random.default_rng(6), 0, 0, 0
    for _ in range(100):
        values = np.exp(0.03 * random.normal(size=(60, 30)))
        values[7, at:] *= 1.1
        made = find_change_points(values)
        found += len(made[7]) == 1
        within += any(abs(change.at - at) <= 1 for change in made[7])
        elsewhere += any(made[:7] + made[8:])
    assert found >= 90
    assert within >= 85
    assert elsewhere <= 5


def test_steps_are_found_beside_outliers() -> None:
    random = np.random.default_rng(8)
    values = np.exp(0.03 * random.normal(size=(20, 300)))
    values[0, 100:200] *= 1.2
    values[1, 290:] *= 1.2
    values[2, [50, 51, 150, 298, 299]] *= 10
    values[3, 150:] *= 1.03
    made = find_change_points(values)
    assert [round(change.at, -1) for change in made[0]] == [100, 200]
    assert [round(change.ratio, 1) for change in made[0]] == [1.2, 0.8]
    assert [change.at for change in made[1]] == [290]
    assert made[2:] == [[]] * 18


@pytest.mark.parametrize(
    "values", [np.empty((0, 30)), np.empty((3, 0)), np.ones((2, 30)), np.full((2, 9), np.nan)]
)
def test_series_without_changes_find_none(values: np.ndarray) -> None:
    assert find_change_points(values) == [[]] * len(values)


def test_values_below_zero_count_as_unmeasured() -> None:
    values = np.where(np.arange(40) < 20, 1.0, 2.0)[None] * np.exp(
        0.01 * np.random.default_rng(9).normal(size=40)
    )
    values[0, [3, 25]] = 0
    ((change,),) = find_change_points(values)
    assert (change.at, round(change.ratio)) == (20, 2)
    assert not any(find_change_points(values[:, : 2 * LEAST_SIDE]))
