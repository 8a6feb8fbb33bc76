"""What is said of a comparison to people: the environments, then the verdicts, then the costs."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from dcpbench.analysis.cell_identity import shown_axes
from dcpbench.analysis.comparison import Comparison
from dcpbench.analysis.costs import CHANGED, LEAST_RUNS, TOO_FEW, Rule
from dcpbench.analysis.environments import warning
from dcpbench.analysis.status_changes import SAME
from dcpbench.report.document import Content, first_of
from dcpbench.report.pivot import Table

_MOST_OF_A_KIND = 20
_NO_FAILURES = pd.DataFrame(columns=["status", "cell", "reason", "again", "more"])
_EXPLAINED = ("newly failing", "flaky")
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def environments(differing: pd.DataFrame, damaged: Sequence[str]) -> Content:
    """What was different around the sweeps, and what of them could not be read."""
    tables = [Table("environment", differing)] if len(differing) else []
    said = warning(differing) or ("" if tables else "The environments are the same.")
    return Content(tables, _NO_FAILURES, "", first_of(damaged), said)


def verdicts(compared: Comparison, every: bool) -> Content:
    """The cells that came to something else, those to look at first before the others."""
    moved = compared.verdicts[compared.verdicts["change"] != SAME]
    shown = moved if every else moved.groupby("change", sort=False).head(_MOST_OF_A_KIND)
    left = len(moved) - len(shown)
    table = pd.concat([shown["change"], _axes(compared, shown["key"]), shown[["old", "new"]]], axis=1)
    return Content(
        [Table(f"verdicts: {compared.name}", table, ("old", "new"))] if len(table) else [],
        _explained(compared, shown),
        f"and {left} more such changes: --all shows them" if left else "",
        [f"No cell is in both: {compared.apart}"] if compared.apart else [],
        _counts(compared.verdicts),
    )


def costs(compared: Comparison, rule: Rule, every: bool) -> list[Content]:
    """What was measured of the costs of the cells in common, and by which rule it was judged."""
    found = compared.costs
    if found.empty:
        return []
    called = found["verdict"].isin(CHANGED)
    groups = found[found["level"].eq("all") | (found["level"].eq("axis") & (called | every))]
    single = found[found["level"].eq("cell") & (called | every)]
    tables = []
    if len(groups):
        tables.append(Table(f"costs: {compared.name}", _groups(groups), ("verdict",)))
    if len(single):
        tables.append(
            Table(f"costs of single cells: {compared.name}", _cells(compared, single), ("verdict",))
        )
    return [Content(tables, _NO_FAILURES, _counted(found), [], _rule(found, rule, every))]


def _axes(compared: Comparison, keys: "pd.Series[str]") -> pd.DataFrame:
    cells = compared.cells.loc[list(keys)]
    return cells[shown_axes(cells)].rename(columns={"others": "overrides"}).set_axis(keys.index)


def _explained(compared: Comparison, shown: pd.DataFrame) -> pd.DataFrame:
    told = shown[shown["change"].isin(_EXPLAINED)]
    if told.empty:
        return _NO_FAILURES
    axes = _axes(compared, told["key"])
    named = [
        " ".join(value if name == "overrides" else f"{name}={value}" for name, value in cell.items() if value)
        for cell in axes.to_dict("records")
    ]
    return pd.DataFrame(
        {
            "status": told["change"].to_numpy(),
            "cell": named,
            "reason": told["reason"].to_numpy(),
            "again": told["again"].to_numpy(),
            "more": "",
        }
    )


def _counts(told: pd.DataFrame) -> str:
    moved = told.loc[told["change"] != SAME, "change"].value_counts(sort=False)
    phrases = [f"{count} {kind}" for kind, count in moved.items()]
    still = int((told["failing"] & told["change"].eq(SAME)).sum())
    phrases += [f"{still} still not well"] if still else []
    told_of = f" ({', '.join(phrases)})" if phrases else ""
    return f"{len(told)} cells, {int(moved.sum())} with another status{told_of}"


def _groups(lines: pd.DataFrame) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "metric": lines["metric"],
            "of": lines["name"],
            "cells": lines["cells"].astype(str),
            "rounds": _runs(lines),
            "ratio": lines["ratio"].map(_ratio),
            "95 % interval": _interval(lines),
            "would see": lines["would_see"].map(_share),
            "verdict": lines["verdict"],
        }
    )


def _cells(compared: Comparison, lines: pd.DataFrame) -> pd.DataFrame:
    values = {
        side: [_quantity(*pair) for pair in zip(lines["metric"], lines[side], strict=True)]
        for side in ("old", "new")
    }
    said = pd.DataFrame(
        {
            **values,
            "ratio": lines["ratio"].map(_ratio),
            "95 % interval": _interval(lines),
            "would see": lines["would_see"].map(_share),
            "runs": _runs(lines),
            "verdict": lines["verdict"],
        },
        index=lines.index,
    )
    return pd.concat([lines["metric"], _axes(compared, lines["key"]), said], axis=1)


def _counted(found: pd.DataFrame) -> str:
    """How many cells came to what, metric by metric."""
    cells = found[found["level"].eq("cell")]
    told = []
    for metric, lines in cells.groupby("metric", sort=False):
        counted = [f"{count} {verdict}" for verdict, count in lines["verdict"].value_counts().items()]
        told.append(f"{metric}: {', '.join(counted)}")
    few = cells[cells["verdict"].eq(TOO_FEW)]
    if len(few):
        runs = few[["runs_old", "runs_new"]].min(axis=1).min()
        told.append(
            f"too few runs to say: {runs} on one side; {LEAST_RUNS} are needed, 5 are good (repeats=5)"
        )
    return "Single cells: " + "; ".join(told)


def _rule(found: pd.DataFrame, rule: Rule, every: bool) -> str:
    beyond = f"more than the {rule.drift:.0%} that equal sweeps drift apart"
    if found["by_sweep"].any():
        beyond = "not noise, that from sweep to sweep included"
    told = (
        f"slower, faster, larger, smaller: {rule.least_effect:.0%} or more, and a t test on logarithms says "
        f"that it is {beyond}; the chance of any false call in this comparison is held at "
        f"{rule.false_alarms:.2g} (Holm). no change: the interval lies within {rule.least_effect:.0%}. "
        "unclear: neither. would see: the least change that would be called in 9 of 10 comparisons with "
        "this noise."
    )
    whole = found[found["level"].eq("all") & found["verdict"].isin(CHANGED)]
    if len(whole) and not found["by_sweep"].any():
        told = (
            f"{', '.join(whole['metric'])}: all cells moved together. A machine that has changed looks "
            f"alike: run the old side again to tell them apart.\n{told}"
        )
    return told if every else f"{told} --all shows every cell."


def _runs(lines: pd.DataFrame) -> "pd.Series[str]":
    old, new = lines["runs_old"].astype(int).astype(str), lines["runs_new"].astype(int).astype(str)
    return old.where(old == new, old + " and " + new)


def _interval(lines: pd.DataFrame) -> list[str]:
    ends = zip(lines["ratio_low"], lines["ratio_high"], strict=True)
    return ["-" if np.isnan(low) else f"{_ratio(low)} to {_ratio(high)}" for low, high in ends]


def _ratio(value: float) -> str:
    return "-" if np.isnan(value) else f"{value:.3f}" if value < 10 else f"{value:.3g}"


def _share(value: float) -> str:
    return "-" if np.isnan(value) else f"+{value - 1:.0%}" if value < 10 else "×10 or more"


def _quantity(metric: str, value: float) -> str:
    if np.isnan(value):
        return "-"
    if not metric.endswith("_bytes"):
        return f"{value:.4f} s" if value < 1 else f"{value:.3f} s"
    for unit, size in _UNITS:
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value:.0f} B"
