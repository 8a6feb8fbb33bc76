"""Tests for changes of costs, on logarithms, many at once.

One sweep with five repeats measures each cell five times, too few to know the noise of a cell. So it is
estimated from the noise of all cells too (Smyth's moderated t). A change that several cells share is tested
on their means within one round, so that a drift from round to round counts as noise. The rate of false alarms
is limited over all tests (Holm).
"""

from typing import Any

import numpy as np
import pandas as pd
import scipy  # which imports `special` when it is first used

Array = np.ndarray[Any, np.dtype[np.float64]]
Members = np.ndarray[Any, np.dtype[np.bool_]]

LEAST_SD = 1e-3
"""Least standard deviation of a logarithm, for sizes that never vary."""


def group_changes(old: Array, new: Array, members: Members) -> pd.DataFrame:
    """Return the changes of groups of cells; the noise of each is estimated from all groups.

    A group of several cells is its mean in each round, each cell relative to its level. So differences
    between rounds, which all cells share, are in the noise of the group however many cells it has.

    Args:
        old, new: logarithms, (cells, rounds of that side), NaN if a cell was not measured.
        members: (groups, cells), true where the cell belongs to the group.

    Returns:
        one row per group: the `difference` of the mean logarithms (new less old), NaN if a side has none, its
        standard `error` (NaN: no noise was measured) and degrees of `freedom`; its number of `cells`, the
        rounds in which each side measured it (`runs_old`, `runs_new`), and their degrees of freedom
        (`own_freedom`).
    """
    level = np.mean([pd.DataFrame(side).mean(axis=1) for side in (old, new)], axis=0)
    before, after = (_group_means(side - level[:, None], members) for side in (old, new))
    counts = np.array([np.isfinite(side).sum(axis=1) for side in (before, after)], dtype=float)
    means = [pd.DataFrame(side).mean(axis=1).to_numpy() for side in (before, after)]
    squares = sum(
        np.nansum((side - mean[:, None]) ** 2, axis=1)
        for side, mean in zip((before, after), means, strict=True)
    )
    own_freedom = counts[0] + counts[1] - 2
    sizes = members.sum(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        variance = np.maximum(squares / own_freedom, LEAST_SD**2)
        # A mean over many cells varies less: brought to that of one cell to learn from each other.
        variance, freedom = moderated_variances(variance * sizes, own_freedom)
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


def moderated_variances(variance: Array, freedom: Array) -> tuple[Array, Array]:
    """Shrink sample variances towards their common value.

    G. K. Smyth, Linear models and empirical Bayes methods for assessing differential expression in
    microarray experiments, Stat. Appl. Genet. Mol. Biol. 3 (2004), section 6.2: the true variances are
    scaled inverse chi-square, whose two parameters are fitted to the mean and variance of the logarithms.

    Returns:
        the variances and their degrees of freedom, NaN if there are none.
    """
    usable = (freedom > 0) & np.isfinite(variance)
    given, usable_freedom = variance[usable], freedom[usable]
    if len(given) < 2:
        return np.where(usable, variance, np.nan), np.where(usable, freedom, np.nan)
    logs = np.log(given) - scipy.special.digamma(usable_freedom / 2) + np.log(usable_freedom / 2)
    spread = logs.var(ddof=1) - scipy.special.polygamma(1, usable_freedom / 2).mean()
    if spread > 0:
        prior = 2 * _trigamma_inverse(float(spread))
        common = np.exp(logs.mean() + scipy.special.digamma(prior / 2) - np.log(prior / 2))
    else:
        prior, common = np.inf, np.exp(logs.mean())
    # Never more degrees of freedom than were measured, even if the cells look equal.
    total = np.minimum(usable_freedom + prior, usable_freedom.sum())
    weight = (total - usable_freedom) / total
    drawn, together = np.full(len(variance), np.nan), np.full(len(variance), np.nan)
    drawn[usable], together[usable] = weight * common + (1 - weight) * given, total
    return drawn, together


def p_values(difference: Array, error: Array, freedom: Array, allowed: float) -> Array:
    """Return two-sided p values for true differences of at most `allowed`; NaN if no noise was measured."""
    beyond = (np.abs(difference) - allowed) / error
    p = 2 * scipy.special.stdtr(freedom, -np.maximum(beyond, 0))
    return np.where(np.isfinite(error), np.minimum(p, 1.0), np.nan)


def detectable_difference(error: Array, freedom: Array, allowed: float, false_alarms: float) -> Array:
    """Return the differences of logarithms that 9 of 10 comparisons would find."""
    needed = scipy.special.stdtrit(freedom, 1 - false_alarms / (2 * max(len(freedom), 1)))
    return np.asarray(allowed + (needed + scipy.special.stdtrit(freedom, 0.9)) * error)


def holm(p: Array) -> Array:
    """Adjust p values so that reporting those up to `a` has a chance of at most `a` of any false alarm,
    however the tests depend on each other (Holm 1979); NaN is not a test."""
    adjusted = np.full(len(p), np.nan)
    order = np.argsort(p)[: int(np.isfinite(p).sum())]
    steps = np.maximum.accumulate(p[order] * np.arange(len(order), 0, -1))
    adjusted[order] = np.minimum(steps, 1.0)
    return adjusted


def _group_means(values: Array, members: Members) -> Array:
    """Return the mean of each group in each round, (groups, rounds); NaN if no cell was measured."""
    measured = np.isfinite(values)
    counts = members.astype(float) @ measured
    sums = members.astype(float) @ np.where(measured, values, 0.0)
    return np.asarray(sums / np.where(counts, counts, np.nan))


def _trigamma_inverse(value: float) -> float:
    """Return x with trigamma(x) = value, by Newton's method (Smyth 2004, appendix)."""
    root = 0.5 + 1 / value
    for _ in range(20):  # quadratic convergence: fewer steps are exact
        trigamma = float(scipy.special.polygamma(1, root))
        root += trigamma * (1 - trigamma / value) / float(scipy.special.polygamma(2, root))
    return root
