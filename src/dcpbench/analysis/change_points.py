"""Where the level of a series changed for good: a maximally selected rank statistic on normal scores.

The values of a series become the normal scores of their ranks, so that neither the shape of the noise nor
a few wild values matter. For every split with `LEAST_SIDE` values on either side, the sum of the scores on
the left is standardised as under random order; the split where it is largest is where the change lies, if
there is one. Sweeps that are correlated with those before them (a machine that is slower for some days)
would make that too large by chance: it is made smaller by what their correlation says, `_worth`. The p-value
has two steps, both known approximations: for one split, that of a t test on the scores (Conover and Iman, The
American Statistician 35, 1981); for the largest of all of them, the formula of Miller and Siegmund
(Biometrics 38, 1982), as Lausen and Schumacher (Biometrics 48, 1992) use it for ranks. Over all series of
a history Holm's step-down holds the rate. A changed series is split and looked at again on each side,
against a stricter limit: one series may have changed several times.

Series may depend on each other. A slow drift is a change. `bench/changes.py` measures the rates.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.special import ndtri, stdtr

from dcpbench.analysis.statistics import holm

FALSE_ALARMS = 0.05
"""At most in so many histories anything is named in a series that has not changed; see `changes`."""

LEAST_SIDE = 3
"""So many values at least lie on either side of a change."""

LEAST_EFFECT = 0.05
"""A smaller step of the median is not reported, however sure it is: 0.05 is 5 %."""

_FIRST_LOOKS = 0.8 * FALSE_ALARMS
_LATER_LOOKS = 0.2 * FALSE_ALARMS

_TWO_MEANS = 2
"""By so much over their number values seem less alike once the mean on either side is taken off them."""

_DRAWN = 60
"""The mean of all series counts as so many values of each."""

_MOST_ALIKE = 0.9

Floats = npt.NDArray[np.float64]
Present = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Change:
    """From the sweep `at` on, the median went from `before` to `after`, up to the next change or the end.
    `p` is of this series alone."""

    at: int
    before: float
    after: float
    p: float

    @property
    def ratio(self) -> float:
        """How many times what it was before."""
        return self.after / self.before


def changes(values: Floats) -> list[list[Change]]:
    """For each series its changes, the oldest first.

    Args:
        values: (series, sweeps), the sweeps in order of time; NaN where not measured. What is not positive
            is taken as not measured: steps are ratios.

    In at most `FALSE_ALARMS` of histories a change is reported of a series that has none. Four fifths of that
    are spent on the first look at each series, the rest on the looks at both sides of a change, which holds
    as long as there are no more changes than series.
    """
    if not values.size:
        return [[] for _ in values]
    kept = np.where(values > 0, values, np.nan)
    at, p = _scan(kept)
    found = holm(p) <= _FIRST_LOOKS
    later = _LATER_LOOKS / max(1, len(values))
    return [
        _changes_at(series, _splits(series, int(at[number]), float(p[number]), later))
        if found[number]
        else []
        for number, series in enumerate(kept)
    ]


def _scan(values: Floats) -> tuple[npt.NDArray[np.intp], Floats]:
    """For each of (series, sweeps) the first sweep after its best split, and the p-value of that."""
    present = ~np.isnan(values)
    left = present.cumsum(axis=1)
    count = left[:, -1:]
    scores = _scores(values)
    sums = scores.cumsum(axis=1)
    may = present & (left >= LEAST_SIDE) & (count - left >= LEAST_SIDE)
    spread = np.sqrt(np.where(may, left * (count - left) / np.maximum(count, 1), 1.0))
    standardised = np.where(may, np.abs(sums) / spread, 0.0)
    last_before = standardised.argmax(axis=1)
    after = present & (np.arange(values.shape[1]) > last_before[:, None])
    largest = standardised.max(axis=1) * np.sqrt(_worth(scores, present, after))
    return after.argmax(axis=1), _p_of_largest(largest, count[:, 0].astype(float))


def _worth(scores: Floats, present: Present, after: Present) -> Floats:
    """How much of an independent value each value of a series is worth, if sweeps are like those before them:
    (1 - r) / (1 + r), with r the correlation of neighbours on either side of the best split.

    A short series says little of its r, so that each is drawn towards the mean of all. What is not alike, or
    less than not at all, is worth 1.
    """
    rest = scores.copy()
    for side in (present & ~after, after):
        mean = (scores * side).sum(axis=1) / np.maximum(side.sum(axis=1), 1)
        rest -= side * mean[:, None]
    count = np.maximum(present.sum(axis=1), 1)
    products, squares = (rest[:, 1:] * rest[:, :-1]).sum(axis=1), (rest**2).sum(axis=1)
    own = products / np.maximum(squares, 1e-300) + _TWO_MEANS / count
    mean_of_all = (own * count).sum() / count.sum()
    r = (own * count + mean_of_all * _DRAWN) / (count + _DRAWN)
    return np.asarray((1 - r.clip(0, _MOST_ALIKE)) / (1 + r.clip(0, _MOST_ALIKE)))


def _scores(values: Floats) -> Floats:
    """The normal scores of each series, of mean 0 and variance 1; 0 where a value is missing."""
    present = ~np.isnan(values)
    ranks, counts = pd.DataFrame(values.T).rank().to_numpy().T, present.sum(axis=1)
    scores = np.nan_to_num(ndtri(ranks / (counts + 1)[:, None]))
    scores -= present * (scores.sum(axis=1) / np.maximum(counts, 1))[:, None]
    deviation = np.sqrt((scores**2).sum(axis=1) / np.maximum(counts - 1, 1))
    return np.asarray(scores / np.where(deviation > 0, deviation, 1.0)[:, None])


def _p_of_largest(largest: Floats, count: Floats) -> Floats:
    """How likely so large a statistic is at the best of all splits, by chance alone."""
    enough = count >= 2 * LEAST_SIDE
    count = np.where(enough, count, 2 * LEAST_SIDE)
    t = largest * np.sqrt((count - 2) / np.maximum(count - 1 - largest**2, 1e-9))
    of_one = np.clip(stdtr(count - 2, -t), 1e-300, 0.5)  # one-sided
    b = np.maximum(-ndtri(of_one), 1e-9)
    density = np.exp(-(b**2) / 2) / np.sqrt(2 * np.pi)
    edge = LEAST_SIDE / count
    of_all = density * (4 / b + (b - 1 / b) * 2 * np.log((1 - edge) / edge))
    return np.where(enough & (b > 1), np.clip(of_all, 2 * of_one, 1.0), 1.0)


def _splits(series: Floats, at: int, p: float, limit: float) -> Iterator[tuple[int, float]]:
    """The changes of a series, this one and those on both sides of it, in order: where, and the p-value."""
    before, after = np.nanmedian(series[:at]), np.nanmedian(series[at:])
    if not abs(np.log(after / before)) >= np.log1p(LEAST_EFFECT):
        return
    for start, part in ((0, series[:at]), (at, series[at:])):
        if start:
            yield at, p
        (place,), (p_inner,) = _scan(part[None])
        if p_inner <= limit:
            inner = _splits(part, int(place), float(p_inner), limit)
            yield from ((start + inner_at, inner_p) for inner_at, inner_p in inner)


def _changes_at(series: Floats, splits: Iterator[tuple[int, float]]) -> list[Change]:
    """The changes at these places; where one came out too small between the next ones, it goes."""
    found = dict(splits)
    while found:
        edges = [0, *found, series.size]
        levels = [float(np.nanmedian(series[start:end])) for start, end in pairwise(edges)]
        steps = [abs(np.log(after / before)) for before, after in pairwise(levels)]
        if min(steps) >= np.log1p(LEAST_EFFECT):
            steps_found = zip(found.items(), pairwise(levels), strict=True)
            return [Change(at, before, after, p) for (at, p), (before, after) in steps_found]
        del found[list(found)[int(np.argmin(steps))]]
    return []
