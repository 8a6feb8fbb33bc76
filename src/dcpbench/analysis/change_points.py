"""Lasting changes of the level of a series: a maximally selected rank statistic on normal scores.

Values become the normal scores of their ranks, so that the shape of the noise and a few outliers do not
matter. For every split with `LEAST_SIDE` values on either side, the sum of the scores on the left is
standardised as under random order; the largest marks the change, if there is one. Sweeps that correlate with
those before them (a machine that is slower for some days) would make it too large: `_worth` corrects it. The
p-value is approximated in two steps: for one split by a t test on the scores (Conover and Iman, The American
Statistician 35, 1981), for the largest of them by the formula of Miller and Siegmund (Biometrics 38, 1982),
as Lausen and Schumacher (Biometrics 48, 1992) use it for ranks. Holm's step-down limits the rate over all
series. A changed series is split and tested again on each side, with a stricter limit.

Series can depend on each other. A slow drift is a change. `bench/changes.py` measures the rates.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pandas as pd
import scipy  # which imports `special` when it is first used

from dcpbench.analysis.statistics import holm

FALSE_ALARMS = 0.05
"""The largest share of histories with a change in a series that has not changed; see `find_change_points`."""

LEAST_SIDE = 3
"""The least number of values on either side of a change."""

LEAST_EFFECT = 0.05
"""Smaller steps of the median are not reported: 0.05 is 5 %."""

_FIRST_LOOKS = 0.8 * FALSE_ALARMS
_LATER_LOOKS = 0.2 * FALSE_ALARMS

_TWO_MEANS = 2
"""Subtracting the mean on either side lowers the correlation of values by this, divided by their number."""

_DRAWN = 60
"""The mean of all series counts as this many values of each."""

_MOST_ALIKE = 0.9

Floats = npt.NDArray[np.float64]
Present = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Change:
    """A step of the median from `before` to `after` at the sweep `at`, up to the next change or the end; `p`
    is that of this series alone."""

    at: int
    before: float
    after: float
    p: float

    @property
    def ratio(self) -> float:
        """Return the median after the change divided by the one before."""
        return self.after / self.before


def find_change_points(values: Floats) -> list[list[Change]]:
    """Return the changes of each series, the oldest first.

    At most `FALSE_ALARMS` of histories report a change in a series that has none, as long as there are no
    more changes than series. Four fifths of them go to the first test of each series, the rest to the tests
    on both sides of a change.

    Args:
        values: (series, sweeps), the sweeps in order of time; NaN, zero and negative values count as not
            measured, since steps are ratios.
    """
    if not values.size:
        return [[] for _ in values]
    kept = np.where(values > 0, values, np.nan)
    at, p = _scan(kept)
    has_change = holm(p) <= _FIRST_LOOKS
    later = _LATER_LOOKS / max(1, len(values))
    return [
        _changes_at(series, _splits(series, int(at[number]), float(p[number]), later))
        if has_change[number]
        else []
        for number, series in enumerate(kept)
    ]


def _scan(values: Floats) -> tuple[npt.NDArray[np.intp], Floats]:
    """Return for each of (series, sweeps) the first sweep after its best split, and the p-value."""
    present = ~np.isnan(values)
    left = present.cumsum(axis=1)
    count = left[:, -1:]
    scores = _scores(values)
    sums = scores.cumsum(axis=1)
    allowed = present & (left >= LEAST_SIDE) & (count - left >= LEAST_SIDE)
    spread = np.sqrt(np.where(allowed, left * (count - left) / np.maximum(count, 1), 1.0))
    standardised = np.where(allowed, np.abs(sums) / spread, 0.0)
    last_before = standardised.argmax(axis=1)
    after = present & (np.arange(values.shape[1]) > last_before[:, None])
    largest = standardised.max(axis=1) * np.sqrt(_worth(scores, present, after))
    return after.argmax(axis=1), _p_of_largest(largest, count[:, 0].astype(float))


def _worth(scores: Floats, present: Present, after: Present) -> Floats:
    """Return the part of an independent value that each value of a series counts as, for correlated sweeps:
    (1 - r) / (1 + r), with r the correlation of neighbours on either side of the best split.

    Each r is drawn towards the mean of all, since a short series gives a poor estimate; a negative r counts
    as 0.
    """
    rest = scores.copy()
    for side in (present & ~after, after):
        mean = (scores * side).sum(axis=1) / np.maximum(side.sum(axis=1), 1)
        rest -= side * mean[:, None]
    count = np.maximum(present.sum(axis=1), 1)
    products, squares = (rest[:, 1:] * rest[:, :-1]).sum(axis=1), (rest**2).sum(axis=1)
    correlations = products / np.maximum(squares, 1e-300) + _TWO_MEANS / count
    mean_of_all = (correlations * count).sum() / count.sum()
    r = (correlations * count + mean_of_all * _DRAWN) / (count + _DRAWN)
    return np.asarray((1 - r.clip(0, _MOST_ALIKE)) / (1 + r.clip(0, _MOST_ALIKE)))


def _scores(values: Floats) -> Floats:
    """Return the normal scores of each series, of mean 0 and variance 1; 0 for a missing value."""
    present = ~np.isnan(values)
    ranks, counts = pd.DataFrame(values.T).rank().to_numpy().T, present.sum(axis=1)
    scores = np.nan_to_num(scipy.special.ndtri(ranks / (counts + 1)[:, None]))
    scores -= present * (scores.sum(axis=1) / np.maximum(counts, 1))[:, None]
    deviation = np.sqrt((scores**2).sum(axis=1) / np.maximum(counts - 1, 1))
    return np.asarray(scores / np.where(deviation > 0, deviation, 1.0)[:, None])


def _p_of_largest(largest: Floats, count: Floats) -> Floats:
    """Return the probability of a statistic this large at the best of all splits."""
    enough = count >= 2 * LEAST_SIDE
    count = np.where(enough, count, 2 * LEAST_SIDE)
    t = largest * np.sqrt((count - 2) / np.maximum(count - 1 - largest**2, 1e-9))
    of_one = np.clip(scipy.special.stdtr(count - 2, -t), 1e-300, 0.5)  # one-sided
    b = np.maximum(-scipy.special.ndtri(of_one), 1e-9)
    density = np.exp(-(b**2) / 2) / np.sqrt(2 * np.pi)
    edge = LEAST_SIDE / count
    of_all = density * (4 / b + (b - 1 / b) * 2 * np.log((1 - edge) / edge))
    return np.where(enough & (b > 1), np.clip(of_all, 2 * of_one, 1.0), 1.0)


def _splits(series: Floats, at: int, p: float, limit: float) -> Iterator[tuple[int, float]]:
    """Yield the changes of a series in order, this one and those on both sides: the sweep, and the
    p-value."""
    before, after = np.nanmedian(series[:at]), np.nanmedian(series[at:])
    if not abs(np.log(after / before)) >= np.log1p(LEAST_EFFECT):
        return
    for start, stretch in ((0, series[:at]), (at, series[at:])):
        if start:
            yield at, p
        (place,), (p_inner,) = _scan(stretch[None])
        if p_inner <= limit:
            inner = _splits(stretch, int(place), float(p_inner), limit)
            yield from ((start + inner_at, inner_p) for inner_at, inner_p in inner)


def _changes_at(series: Floats, splits: Iterator[tuple[int, float]]) -> list[Change]:
    """Return the changes at these places, without those that are too small between their neighbours."""
    places = dict(splits)
    while places:
        edges = [0, *places, series.size]
        levels = [float(np.nanmedian(series[start:end])) for start, end in pairwise(edges)]
        steps = [abs(np.log(after / before)) for before, after in pairwise(levels)]
        if min(steps) >= np.log1p(LEAST_EFFECT):
            steps_found = zip(places.items(), pairwise(levels), strict=True)
            return [Change(at, before, after, p) for (at, p), (before, after) in steps_found]
        del places[list(places)[int(np.argmin(steps))]]
    return []
