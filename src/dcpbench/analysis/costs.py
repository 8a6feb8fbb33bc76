"""Changes in the costs of the cells that are on both sides: over all cells, by axis value, by cell."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import scipy  # which imports `special` when it is first used

from dcpbench.analysis import statistics
from dcpbench.core.axes import AXES
from dcpbench.core.metrics import METRICS

AnyArray = np.ndarray[Any, np.dtype[Any]]

FALSE_ALARMS = 0.01
"""The chance of any false alarm in one comparison."""
LEAST_EFFECT = 0.05
"""Smaller changes are not reported: 0.05 is 5 %."""
DRIFT = 0.03
"""How much all costs of two equal sweeps can differ, if there are too few sweeps to measure it."""
LEAST_RUNS = 3
_WHOLE = {"cell_s", "peak_device_bytes", "peak_host_bytes"}
_WHOLE |= {spec.name for spec in METRICS.values() if spec.whole_phase}
"""Metrics of a whole cell; another cell can do a part of its work (`training_from`)."""
_LEAST_FREEDOM = 4
_SHARES = {"all": 0.5, "axis": 0.25, "cell": 0.25}
"""How the allowed false alarms are divided over the tests of all cells, of axis values, of single cells."""

CHANGED = ("slower", "faster", "larger", "smaller")
NO_CHANGE, UNCLEAR, TOO_FEW, NOT_MEASURED = "no change", "unclear", "too few runs", "not measured"
COLUMNS = ["metric", "level", "name", "key", "cells", "runs_old", "runs_new", "old", "new"]
COLUMNS += ["ratio", "ratio_low", "ratio_high", "would_see", "p", "by_sweep", "verdict"]


def always_compared() -> tuple[str, ...]:
    """Return the metrics that are compared by default."""
    return tuple(spec.name for spec in METRICS.values() if spec.compared == "always")


def is_regression(lines: pd.DataFrame) -> "pd.Series[bool]":
    """Tell which lines have a cost that is worse than before."""
    worse = {"lower": ("slower", "larger"), "higher": ("faster", "smaller"), None: ()}
    verdicts = zip(lines["metric"], lines["verdict"], strict=True)
    regressions = [verdict in worse[METRICS[metric].better] for metric, verdict in verdicts]
    return pd.Series(regressions, index=lines.index, dtype=bool)


def are_comparable(frame: pd.DataFrame, newest: pd.DataFrame, metric: str) -> "pd.Series[bool]":
    """Return which rows have values of a metric that can be compared with those of the `newest` row of their
    cell: ranks that share GPUs take other times than ranks with a GPU each, and a cell that shares the
    training of another takes less as a whole. Both frames have the column `key`."""
    timed = METRICS[metric].unit == "s"

    def how(rows: pd.DataFrame) -> "pd.Series[str]":
        shared = rows["ranks_per_gpu"].fillna(1).astype(int)
        gpus = (shared.astype(str) + rows["backend"].fillna("")).where((shared > 1) & timed, "")
        return gpus + (rows["training_from"].notna() & (metric in _WHOLE)).astype(str)

    wanted = how(newest).groupby(newest["key"]).last()
    return how(frame) == frame["key"].map(wanted)


def compare_costs(old: pd.DataFrame, new: pd.DataFrame, metrics: Sequence[str]) -> pd.DataFrame:
    """Return one line for each metric over all cells, each axis value and each common cell, with its verdict.

    `old` and `new` are medians of a cell, in seconds or bytes. `ratio` is new / old of geometric means with
    its 95 % interval, `would_see` the change that 9 of 10 comparisons with this noise would find; `p` is
    adjusted for all tests of the line's level.
    """
    before, after = _usable(old), _usable(new)
    cells = before[before["key"].isin(after["key"])].drop_duplicates("key").set_index("key")
    if cells.empty:
        return pd.DataFrame(columns=COLUMNS)
    by_sweep = before["sweep"].nunique() + after["sweep"].nunique() - 2 >= _LEAST_FREEDOM
    lines = []
    for metric in metrics:
        old, new = (rows[are_comparable(rows, after, metric)] for rows in (before, after))
        lines.append(_lines(metric, old, new, cells, by_sweep))
    # One sweep is one sample of the machine's state; with enough of them the drift is part of their noise.
    table = pd.concat(lines, ignore_index=True).assign(by_sweep=by_sweep)
    return _judged(table, 0.0 if by_sweep else DRIFT)


def _usable(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the runs with comparable costs: those that ended as expected, without injected faults."""
    return frame[frame["status"].isin(["pass", "xfail"]) & frame["fault"].eq("-")]


def _side(frame: pd.DataFrame, metric: str, keys: list[str], by_sweep: bool) -> tuple[pd.DataFrame, AnyArray]:
    """Return one side's measurements of a metric; a round is a sweep if `by_sweep`, else one of its repeats.

    Returns:
        `count`, `median`, `min` and `max` by the cells' keys; and the logarithm of each cell in each round,
        (cells, rounds), NaN if it was not measured.
    """
    values = pd.to_numeric(frame[metric], errors="coerce").astype(float)
    if metric == "save_stall_s":  # in a synchronous save it equals save_s
        values = values.mask(frame["save"].eq("sync"))
    seen = frame.assign(value=values.where(values > 0))[["key", "sweep", "repeat", "value"]].dropna()
    known = seen.groupby("key")["value"].agg(["count", "median", "min", "max"]).reindex(keys)
    rounds = ["sweep"] if by_sweep else ["sweep", "repeat"]
    logs = np.log(seen["value"]).groupby([seen[name] for name in ("key", *rounds)]).mean()
    table = logs.unstack(rounds) if len(logs) else pd.DataFrame(index=pd.Index([], name="key"))
    return known.fillna({"count": 0}).astype({"count": int}), table.reindex(keys).to_numpy(dtype=float)


def _groups(cells: pd.DataFrame, measured: AnyArray) -> tuple[list[str], AnyArray]:
    """Return sets of cells that can share a change: their names, and their members, (sets, cells). Each is
    the value of an axis that several, but not all, of the `measured` cells have.
    """
    groups: dict[str, AnyArray] = {}
    for axis in (spec.name for spec in AXES.values() if spec.grouped):
        values = cells[axis].to_numpy()
        for axis_value in dict.fromkeys(values[measured]):
            chosen = measured & (values == axis_value)
            if 1 < chosen.sum() < measured.sum():
                groups[f"{axis}={axis_value}"] = chosen
    return list(groups), np.array(list(groups.values()), dtype=bool).reshape(len(groups), len(cells))


def _lines(
    metric: str, before: pd.DataFrame, after: pd.DataFrame, cells: pd.DataFrame, by_sweep: bool
) -> pd.DataFrame:
    """Return the lines of one metric without verdicts: differences of logarithms, with their errors."""
    keys = list(cells.index)
    (old, old_logs), (new, new_logs) = (_side(rows, metric, keys, by_sweep) for rows in (before, after))
    both = (old["count"].gt(0) & new["count"].gt(0)).to_numpy()
    parts = []
    if not METRICS[metric].counted and both.any():
        every = statistics.group_changes(old_logs, new_logs, both[None, :])
        parts.append(every.assign(level="all", name="all cells"))
        names, members = _groups(cells, both)
        if names:
            of_axes = statistics.group_changes(old_logs, new_logs, members)
            parts.append(of_axes.assign(level="axis", name=names))
    single = statistics.group_changes(old_logs, new_logs, np.eye(len(cells), dtype=bool)).set_axis(
        cells.index
    )
    single = single.assign(
        level="cell",
        key=keys,
        runs_old=old["count"],
        runs_new=new["count"],
        old=old["median"],
        new=new["median"],
        apart=(new["min"] > old["max"]) | (new["max"] < old["min"]),
    )
    return pd.concat([*parts, single], ignore_index=True).assign(metric=metric)


def _judged(lines: pd.DataFrame, drift: float) -> pd.DataFrame:
    lines = lines.reindex(columns=[*dict.fromkeys([*lines.columns, *COLUMNS])])
    counted = lines["metric"].isin([spec.name for spec in METRICS.values() if spec.counted])
    enough = lines[["runs_old", "runs_new"]].min(axis=1) >= np.where(lines["level"] == "cell", LEAST_RUNS, 1)
    tested = ~counted & enough & (lines["own_freedom"] >= _LEAST_FREEDOM) & lines["error"].notna()
    lines["ratio"] = np.exp(lines["difference"])
    called = pd.Series(False, index=lines.index)
    for level, share in _SHARES.items():
        chosen = tested & (lines["level"] == level)
        difference, error, freedom = lines.loc[chosen, ["difference", "error", "freedom"]].to_numpy(float).T
        allowed, budget = float(np.log1p(drift)), share * FALSE_ALARMS
        lines.loc[chosen, "p"] = statistics.holm(statistics.p_values(difference, error, freedom, allowed))
        called |= chosen & (lines["p"] <= budget)
        half = scipy.special.stdtrit(freedom, 0.975) * error
        lines.loc[chosen, "ratio_low"] = np.exp(difference - half)
        lines.loc[chosen, "ratio_high"] = np.exp(difference + half)
        seen = np.exp(statistics.detectable_difference(error, freedom, allowed, budget))
        lines.loc[chosen, "would_see"] = np.maximum(seen, 1 + LEAST_EFFECT)
    called |= counted & lines["apart"].eq(True)
    least = float(np.log1p(LEAST_EFFECT))
    called &= lines["difference"].abs() >= least
    within = (np.log(lines["ratio_low"]) > -least) & (np.log(lines["ratio_high"]) < least)
    up, time = lines["difference"] > 0, lines["metric"].map(lambda metric: METRICS[metric].unit == "s")
    direction = np.select([time & up, time, up], ["slower", "faster", "larger"], "smaller")
    lines["verdict"] = np.select(
        [lines["difference"].isna(), called, ~tested & ~counted, within | counted],
        [NOT_MEASURED, direction, TOO_FEW, NO_CHANGE],
        UNCLEAR,
    )
    return lines[COLUMNS]
