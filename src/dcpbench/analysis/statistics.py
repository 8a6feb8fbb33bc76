"""Is a cost another one than before, or is it noise? Tests on logarithms, many at once.

One sweep with five repeats measures each cell five times: far too few to know a cell's own noise well, and
many cells are looked at at once. So the noise of a cell is estimated from that of all cells too (Smyth's
moderated t), what several cells share is tested on means over these cells within one round, so that a
drift from round to round counts as the noise it is, and the rate of false alarms is held over everything
that is looked at (Holm).
"""

from typing import Any

import numpy as np
import pandas as pd
from scipy.special import digamma, polygamma, stdtr, stdtrit

Array = np.ndarray[Any, np.dtype[np.float64]]
Members = np.ndarray[Any, np.dtype[np.bool_]]

LEAST_SD = 1e-3
"""Standard deviation of a logarithm below which nothing is believed: sizes that never vary have none."""


def changes(old: Array, new: Array, members: Members) -> pd.DataFrame:
    """The change of groups of cells, each noise estimated from that of all groups.

    A group of several cells is its mean in each round, each cell taken from its own level. Differences
    between rounds, which all cells share, are so in the noise of the group and do not shrink with the
    number of its cells.

    Args:
        old, new: logarithms, (cells, rounds of that side), NaN where a cell was not measured.
        members: (groups, cells), true where the cell belongs to the group.

    Returns:
        a row a group: the `difference` of the mean logarithms (new less old), NaN where a side has none, its
        standard `error` (NaN: no noise was seen) and degrees of `freedom`; how many `cells` it has, in how
        many rounds each side measured it (`runs_old`, `runs_new`), and the freedom of these alone
        (`own_freedom`).
    """
    level = (_mean(old) + _mean(new)) / 2
    before, after = (_group_means(side - level[:, None], members) for side in (old, new))
    counts = np.array([np.isfinite(side).sum(axis=1) for side in (before, after)], dtype=float)
    means = [_mean(side) for side in (before, after)]
    squares = sum(
        np.nansum((side - mean[:, None]) ** 2, axis=1)
        for side, mean in zip((before, after), means, strict=True)
    )
    own_freedom = counts[0] + counts[1] - 2
    sizes = members.sum(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        variance = np.maximum(squares / own_freedom, LEAST_SD**2)
        # A mean over many cells varies less: brought to that of one cell to learn from each other.
        variance, freedom = moderated(variance * sizes, own_freedom)
        error = np.sqrt(variance / sizes * (1 / counts[0] + 1 / counts[1]))
    return pd.DataFrame(
        {
            "cells": sizes,
            "runs_old": counts[0].astype(int),
            "runs_new": counts[1].astype(int),
            "own_freedom": own_freedom,
            "difference": means[1] - means[0],
            "error": error,
            "freedom": freedom,
        }
    )


def moderated(variance: Array, freedom: Array) -> tuple[Array, Array]:
    """Sample variances drawn towards what they have in common, as far as they have it.

    G. K. Smyth, Linear models and empirical Bayes methods for assessing differential expression in
    microarray experiments, Stat. Appl. Genet. Mol. Biol. 3 (2004), section 6.2: the true variances are
    scaled inverse chi-square, whose two parameters are fitted to the mean and variance of the logarithms.

    Returns:
        the variances and their degrees of freedom, NaN where there were none.
    """
    usable = (freedom > 0) & np.isfinite(variance)
    given, own = variance[usable], freedom[usable]
    if len(given) < 2:
        return np.where(usable, variance, np.nan), np.where(usable, freedom, np.nan)
    logs = np.log(given) - digamma(own / 2) + np.log(own / 2)
    spread = logs.var(ddof=1) - polygamma(1, own / 2).mean()
    if spread > 0:
        prior = 2 * _trigamma_inverse(float(spread))
        common = np.exp(logs.mean() + digamma(prior / 2) - np.log(prior / 2))
    else:
        prior, common = np.inf, np.exp(logs.mean())
    # No more degrees of freedom than were measured, however alike the cells look.
    total = np.minimum(own + prior, own.sum())
    weight = (total - own) / total
    drawn, together = np.full(len(variance), np.nan), np.full(len(variance), np.nan)
    drawn[usable], together[usable] = weight * common + (1 - weight) * given, total
    return drawn, together


def p_values(difference: Array, error: Array, freedom: Array, allowed: float) -> Array:
    """Two-sided p for `the true difference is at most `allowed``; NaN where no noise was seen."""
    beyond = (np.abs(difference) - allowed) / error
    p = 2 * stdtr(freedom, -np.maximum(beyond, 0))
    return np.where(np.isfinite(error), np.minimum(p, 1.0), np.nan)


def would_see(error: Array, freedom: Array, allowed: float, false_alarms: float) -> Array:
    """The difference of logarithms that each of these would be called for in 9 of 10 comparisons."""
    needed = stdtrit(freedom, 1 - false_alarms / (2 * max(len(freedom), 1)))
    return np.asarray(allowed + (needed + stdtrit(freedom, 0.9)) * error)


def holm(p: Array) -> Array:
    """p values such that calling those up to `a` has a chance of at most `a` of any false call, however
    the tests depend on each other (Holm 1979); NaN is no test."""
    adjusted = np.full(len(p), np.nan)
    order = np.argsort(p)[: int(np.isfinite(p).sum())]
    steps = np.maximum.accumulate(p[order] * np.arange(len(order), 0, -1))
    adjusted[order] = np.minimum(steps, 1.0)
    return adjusted


def _mean(values: Array) -> Array:
    counts = np.isfinite(values).sum(axis=1)
    with np.errstate(invalid="ignore"):
        return np.asarray(np.nansum(values, axis=1) / np.where(counts, counts, np.nan))


def _group_means(values: Array, members: Members) -> Array:
    """Of each group the mean over its cells in each round, (groups, rounds); NaN where none was measured."""
    measured = np.isfinite(values)
    counts = members.astype(float) @ measured
    sums = members.astype(float) @ np.where(measured, values, 0.0)
    return np.asarray(sums / np.where(counts, counts, np.nan))


def _trigamma_inverse(value: float) -> float:
    """x with trigamma(x) = value, by Newton's method (Smyth 2004, appendix)."""
    x = 0.5 + 1 / value
    for _ in range(20):  # quadratic convergence: far fewer steps are exact
        trigamma = float(polygamma(1, x))
        x += trigamma * (1 - trigamma / value) / float(polygamma(2, x))
    return x
