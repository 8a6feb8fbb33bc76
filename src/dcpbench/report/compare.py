"""`dcpbench compare OLD NEW...`: print which statuses changed, and which costs beyond noise."""

import io
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from dcpbench.analysis.cell_identity import names_of_cells
from dcpbench.analysis.comparison import (
    FAIL_ON,
    MACHINE,
    NEWLY_FAILING,
    OTHER_CONFIGURATION,
    SAME,
    SweepComparison,
    code_changes,
    compare_sweeps,
    environment_differences,
)
from dcpbench.analysis.costs import (
    CHANGED,
    DRIFT,
    FALSE_ALARMS,
    LEAST_EFFECT,
    LEAST_RUNS,
    TOO_FEW,
    always_compared,
)
from dcpbench.analysis.differing import axes_that_differ
from dcpbench.analysis.frame import Sweeps, read_sweeps, short_names
from dcpbench.analysis.query import QueryError, split_names
from dcpbench.analysis.runs import grouped_failures, remarks, user_targets
from dcpbench.config.text import counted, listed
from dcpbench.core.axes import AXES
from dcpbench.core.metrics import METRICS
from dcpbench.records.store import ResultsError
from dcpbench.report.document import (
    Content,
    Table,
    document_text,
    first_sentences,
    format_of,
    quantity_text,
    rows_text,
    write_output,
)
from dcpbench.report.styles import print_error

_FORMATS = {".txt": "table", ".md": "markdown", ".csv": "csv", ".json": "json"}

_MOST_OF_A_KIND = 20
_EXPLAINED = (NEWLY_FAILING, "flaky", OTHER_CONFIGURATION)
_NAMED_CELLS = 3
_UNREPEATED = (
    "No cell was repeated, so costs cannot be compared: run both sides again with repeats=5 "
    "(dcpbench run ... repeats=5)."
)


def main(
    old: Path,
    new: Sequence[Path],
    earlier: Sequence[Path] = (),
    all: bool = False,
    metric: Sequence[str] = (),
    ignore: Sequence[str] = (),
    fail_on: Sequence[str] = (),
    format: str | None = None,
    output: Path | None = None,
) -> int:
    """Compare sweeps; return 1 if a change of `fail_on` was found, raise ResultsError on bad input."""
    known = list(dict.fromkeys([*always_compared(), *METRICS]))
    chosen = _known("--metric", split_names(metric), known, "is not a metric; choose one of")
    metrics, ignored = chosen or always_compared(), split_names(ignore)
    kinds = _known("--fail-on", split_names(fail_on), FAIL_ON, "is not a kind of change; choose one of")
    written_as = format_of(format, output, _FORMATS)
    sides = {place: read_sweeps([place]) for place in dict.fromkeys([old, *new])}
    before = read_sweeps(earlier) if earlier else Sweeps(pd.DataFrame(), {}, [])
    if earlier:  # without those that are compared
        given = {Path(folder).resolve() for side in sides.values() for folder in side.environments}
        others = before.frame["sweep"].map(lambda folder: Path(folder).resolve() not in given)
        before = replace(before, frame=before.frame[others.astype(bool)])
    names = {Path(place): name for place, name in short_names([str(place) for place in sides]).items()}
    if not any(len(side.frame) for side in sides.values()):
        raise ResultsError(f"{', '.join(map(str, sides))}: no rows yet")
    first = sides[old].frame
    comparisons = [
        compare_sweeps(names[place], first, sides[place].frame, metrics, ignored, before.frame)
        for place in new
    ]
    if written_as in ("csv", "json"):
        flat = pd.concat([comparison.flat() for comparison in comparisons], ignore_index=True)
        text = rows_text(flat, written_as)
    else:
        damaged = [sentence for side in [*sides.values(), before] for sentence in side.left_out]
        differing = environment_differences({names[place]: side for place, side in sides.items()})
        code = [
            f"{names[place]}: {change}." if len(new) > 1 else f"{change[0].upper()}{change[1:]}."
            for place in new
            for change in code_changes(sides[old], sides[place])
        ]
        contents = [Content(headline="\n".join(code))] if code else []
        cells = [
            comparison.costs[comparison.costs["level"].eq("cell")]
            for comparison in comparisons
            if len(comparison.costs)
        ]
        runs = [side[["runs_old", "runs_new"]].max().min() for side in cells if len(side)]
        contents += [Content(headline=_UNREPEATED)] if runs and max(runs) <= 1 else []
        contents.append(_environments(differing, bool(code), damaged, comparisons))
        for comparison in comparisons:
            contents.append(_statuses(comparison, all))
            contents += [_configurations(comparison, all)] if len(comparison.configurations) else []
            contents += [_costs(comparison, all)] if not comparison.apart else []
        contents += [
            Content(headline=f"{names[folder]}: {text}")
            for folder in new
            for text in remarks(sides[folder].frame)
        ]
        text = document_text(contents, written_as, io.StringIO() if output else sys.stdout)
    write_output(text, output)
    met = [name for name in kinds if any(name in comparison.kinds() for comparison in comparisons)]
    if met:
        print_error(f"--fail-on: found {', '.join(met)}")
    return 1 if met else 0


def epilog() -> str:
    """Return the end of the help text."""
    metrics, kinds = ", ".join(always_compared()), ", ".join(FAIL_ON)
    return f"""\
A folder of sweeps contributes the rows of all of them, as more runs of the same cells. Cells are matched
by their axes, other overrides and configuration. The rule for a changed cost is printed below the
tables, and explained in docs/compare.md.

Without --metric: {metrics}. --fail-on: {kinds}."""


def _known(option: str, names: Sequence[str], known: Sequence[str], problem: str) -> tuple[str, ...]:
    for name in names:
        if name not in known:
            raise QueryError(f"{option}: {name} {problem} {', '.join(known)}")
    return tuple(names)


def _environments(
    differing: pd.DataFrame, other_code: bool, damaged: Sequence[str], comparisons: Sequence[SweepComparison]
) -> Content:
    """Return what differs in the environments, and what could not be read."""
    machine = ", ".join(what for what in differing["what"] if what in MACHINE)
    doubt = f"The machines differ ({machine}), which can be the only cause of changed costs."
    text = doubt if machine else ""
    if differing.empty and not other_code:
        reconfigured = any(len(comparison.configurations) for comparison in comparisons)
        but = "; configurations are not, see below" if reconfigured else ""
        text = f"The environments are the same{but}."
    tables = [Table("environment", differing)] if len(differing) else []
    return Content(tables, damaged=first_sentences(damaged), headline=text)


def _statuses(compared: SweepComparison, every: bool) -> Content:
    """Return the cells whose status changed, the worst changes first."""
    changed = compared.statuses[compared.statuses["change"] != SAME]
    first = changed if every else changed.groupby("change", sort=False).head(_MOST_OF_A_KIND)
    shown = first[first["change"] != OTHER_CONFIGURATION]
    left = int((changed["change"] != OTHER_CONFIGURATION).sum()) - len(shown)
    table = pd.concat([shown["change"], _axes(compared, shown["key"]), shown[["old", "new"]]], axis=1)
    explained = first[first["change"].isin(_EXPLAINED) & first["failing"]].reset_index(drop=True)
    failures = explained[["reason", "cause", "again"]].assign(
        status=explained["change"],
        cell=names_of_cells(cells := compared.cells.loc[list(explained["key"])]),
        target=user_targets(cells).to_numpy(),
    )
    return Content(
        [Table(f"verdicts: {compared.name}", table, ("old", "new"))] if len(table) else [],
        grouped_failures(failures),
        f"and {left} more changes; pass --all to list them" if left else "",
        [f"No cell is in both: {compared.apart}"] if compared.apart else [],
        _counts(compared.statuses),
    )


def _configurations(compared: SweepComparison, every: bool) -> Content:
    """Return the keys in which configurations differ, one line for all cells with the same difference."""
    names = dict(zip(compared.cells.index, names_of_cells(compared.cells), strict=True))
    lines = []
    for (key, old, new), rows in compared.configurations.groupby(["name", "old", "new"], sort=False):
        cells = [names[cell] for cell in rows["key"]]
        which = listed(cells, len(cells) if every else _NAMED_CELLS, ", and")
        lines.append((key, f"{old} → {new}", str(len(cells)), which))
    table = pd.DataFrame(lines, columns=["key", "old → new", "cells", "which"])
    number = counted(compared.configurations["key"].nunique(), "cell")
    headline = f"{number} with another configuration: neither statuses nor costs are compared."
    return Content([Table(f"configurations: {compared.name}", table)], headline=headline)


def _costs(compared: SweepComparison, every: bool) -> Content:
    """Return the costs of the common cells, and the rule for a change."""
    costs = compared.costs
    if costs.empty:
        return Content(headline="No costs are compared: no cell passed on both sides.")
    called = costs["verdict"].isin(CHANGED)
    groups = costs[costs["level"].eq("all") | (costs["level"].eq("axis") & (called | every))]
    single = costs[costs["level"].eq("cell") & (called | every)]
    tables = [
        Table(f"{title}: {compared.name}", _cost_table(compared, lines, lines is single), ("verdict",))
        for title, lines in (("costs", groups), ("costs of single cells", single))
        if len(lines)
    ]
    return Content(tables, more=_counted(costs), headline=_rule(costs, every))


def _axes(compared: SweepComparison, keys: "pd.Series[str]") -> pd.DataFrame:
    """Return parallelism, and the axes and overrides in which these cells differ."""
    cells = compared.cells.loc[list(keys)].rename(columns={"others": "overrides"})
    axes = [axis for axis in (*AXES, "overrides") if axis in cells]
    differing = {"parallel", *axes_that_differ({axis: [*cells[axis]] for axis in axes})}
    return cells[[axis for axis in axes if axis in differing]].set_axis(keys.index)


def _counts(statuses: pd.DataFrame) -> str:
    changed = statuses.loc[statuses["change"] != SAME, "change"].value_counts(sort=False)
    compared = changed.drop(OTHER_CONFIGURATION, errors="ignore")
    phrases = [f"{count} {change}" for change, count in compared.items()]
    still = int((statuses["failing"] & statuses["change"].eq(SAME)).sum())
    reconfigured = int(changed.sum() - compared.sum())
    phrases += [f"{reconfigured} with another configuration"] if reconfigured else []
    phrases += [f"{still} still not ok"] if still else []
    named = f": {', '.join(phrases)}" if phrases else ""
    return f"{int(compared.sum())} of {counted(len(statuses), 'cell')} changed{named}"


def _cost_table(compared: SweepComparison, lines: pd.DataFrame, single: bool) -> pd.DataFrame:
    runs = [lines[side].astype(int).astype(str) for side in ("runs_old", "runs_new")]
    ends = zip(lines["ratio_low"], lines["ratio_high"], strict=True)
    table = pd.DataFrame(
        {
            "metric": lines["metric"],
            "of": lines["name"],
            "cells": lines["cells"].astype(str),
            "runs": runs[0].where(runs[0] == runs[1], runs[0] + " and " + runs[1]),
            **{side: list(map(quantity_text, lines["metric"], lines[side])) for side in ("old", "new")},
            "ratio": lines["ratio"].map(_ratio),
            "95 % interval": [
                "-" if np.isnan(low) else f"{_ratio(low)} to {_ratio(high)}" for low, high in ends
            ],
            "smallest\ndetectable": lines["would_see"].map(
                lambda value: "-" if np.isnan(value) else f"+{value - 1:.0%}" if value < 10 else "×10 or more"
            ),
            "verdict": lines["verdict"],
        }
    )
    judged = ["ratio", "95 % interval", "smallest\ndetectable"]
    if single:
        measured = table[["old", "new", *judged, "runs", "verdict"]]
        return pd.concat([table["metric"], _axes(compared, lines["key"]), measured], axis=1)
    return table[["metric", "of", "cells", "runs", *judged, "verdict"]].rename(columns={"runs": "rounds"})


def _counted(costs: pd.DataFrame) -> str:
    """Count the verdicts of single cells for each metric."""
    cells = costs[costs["level"].eq("cell")]
    phrases = []
    for metric, lines in cells.groupby("metric", sort=False):
        counted = [f"{count} {verdict}" for verdict, count in lines["verdict"].value_counts().items()]
        phrases.append(f"{metric}: {', '.join(counted)}")
    few = cells[cells["verdict"].eq(TOO_FEW)]
    if len(few):
        runs = few[["runs_old", "runs_new"]].min(axis=1).min()
        phrases.append(
            f"too few runs: {runs} on one side, and at least {LEAST_RUNS} are needed; pass repeats=5"
        )
    return "Single cells: " + "; ".join(phrases)


def _rule(costs: pd.DataFrame, every: bool) -> str:
    beyond = f"than the {DRIFT:.0%} by which equal sweeps differ"
    if costs["by_sweep"].any():
        beyond = "than noise, that from sweep to sweep included"
    text = (
        f"slower, faster, larger, smaller: a change of {LEAST_EFFECT:.0%} or more that a t test on "
        f"logarithms finds larger {beyond}; the chance of any false alarm in this comparison is at most "
        f"{FALSE_ALARMS:.2g} (Holm). no change: the interval is within {LEAST_EFFECT:.0%}. "
        "unclear: neither. smallest detectable: the change found in 9 of 10 comparisons with this noise."
    )
    of_all = costs[costs["level"].eq("all") & costs["verdict"].isin(CHANGED)]
    if len(of_all) and not costs["by_sweep"].any():
        text = (
            f"{', '.join(of_all['metric'])}: all cells changed together, as they do if the machine has "
            f"changed; run the old side again to distinguish the two.\n{text}"
        )
    return text if every else f"{text} Pass --all to list every cell."


def _ratio(value: float) -> str:
    return "-" if np.isnan(value) else f"{value:.3f}" if value < 10 else f"{value:.3g}"
