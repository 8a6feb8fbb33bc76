"""`dcpbench compare OLD NEW...`: which statuses changed, and which costs beyond noise."""

import io
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from dcpbench.analysis.cell_identity import cell_names, shown_axes
from dcpbench.analysis.comparison import (
    FAIL_ON,
    NEWLY_FAILING,
    OTHER_CONFIGURATION,
    SAME,
    Comparison,
    compared,
    differences,
    warning,
)
from dcpbench.analysis.costs import CHANGED, LEAST_RUNS, TOO_FEW, Rule, always_compared
from dcpbench.analysis.frame import Sweeps, read_sweeps, short_names
from dcpbench.analysis.query import QueryError, names_in
from dcpbench.analysis.runs import of_a_kind
from dcpbench.config.text import counted
from dcpbench.core.metrics import METRICS
from dcpbench.records.store import ResultsError
from dcpbench.report.document import Content, Table, first_of
from dcpbench.report.labels import quantity
from dcpbench.report.output import document_text, format_of, put_out, rows_text
from dcpbench.report.styles import complain

_FORMATS = {".txt": "table", ".md": "markdown", ".csv": "csv", ".json": "json"}

_MOST_OF_A_KIND = 20
_EXPLAINED = (NEWLY_FAILING, "flaky", OTHER_CONFIGURATION)
_NAMED_CELLS = 3


def main(
    old: Path,
    new: Sequence[Path],
    earlier: Sequence[Path] = (),
    all: bool = False,
    metric: Sequence[str] = (),
    ignore: Sequence[str] = (),
    fail_on: Sequence[str] = (),
    least_effect: float | None = None,
    drift: float | None = None,
    false_alarms: float | None = None,
    format: str | None = None,
    raw: bool = False,
    output: Path | None = None,
) -> int:
    """Compare sweeps; 1 if something is found that `fail_on` names, ResultsError if that cannot be done."""
    metrics = list(dict.fromkeys([*always_compared(), *METRICS]))
    chosen = _known("--metric", names_in(metric), metrics, "is not compared; the metrics")
    shares = {"least_effect": least_effect, "drift": drift, "false_alarms": false_alarms}
    given = {name: share for name, share in shares.items() if share is not None}
    rule = Rule(**given, metrics=chosen or always_compared())
    ignored = names_in(ignore)
    kinds = _known("--fail-on", names_in(fail_on), FAIL_ON, "is no kind of change; the kinds")
    written_as = format_of(format, output, _FORMATS)
    sides = {place: read_sweeps([place]) for place in dict.fromkeys([old, *new])}
    before = _earlier(earlier, sides.values())
    names = {Path(place): name for place, name in short_names([str(place) for place in sides]).items()}
    if not any(len(side.frame) for side in sides.values()):
        raise ResultsError(f"{', '.join(map(str, sides))}: no rows yet, so there is nothing to compare")
    first = sides[old].frame
    found = [compared(names[place], first, sides[place].frame, rule, ignored, before.frame) for place in new]
    if written_as in ("csv", "json"):
        flat = pd.concat([one.flat() for one in found], ignore_index=True)
        text = rows_text(flat, written_as, raw)
    else:
        damaged = [sentence for side in [*sides.values(), before] for sentence in side.left_out]
        differing = differences({names[place]: side for place, side in sides.items()})
        contents = [*_unrepeated(found), _environments(differing, damaged, found)]
        for one in found:
            contents.append(_statuses(one, all))
            contents += [_configurations(one, all)] if len(one.configurations) else []
            contents += [_costs(one, rule, all)] if len(one.costs) else []
        text = document_text(contents, written_as, io.StringIO() if output else sys.stdout)
    put_out(text, output)
    met = [name for name in kinds if any(name in one.kinds() for one in found)]
    if met:
        complain(f"found what --fail-on names: {', '.join(met)}")
    return 1 if met else 0


def epilog() -> str:
    """What ends the help."""
    metrics, kinds = ", ".join(always_compared()), ", ".join(FAIL_ON)
    return f"""\
A side that is a folder of sweeps is all of their rows: more runs of the same cells. Cells are
matched by their axes, by overrides that are no axis, and by their whole configuration. The rule by
which a cost is called another one stands below the tables, and in docs/compare.md.

Without --metric: {metrics}. --fail-on takes one or several of {kinds}."""


def _earlier(places: Sequence[Path], sides: Iterable[Sweeps]) -> Sweeps:
    """The sweeps before the old one, without those that are compared: they may lie in the same folder."""
    if not places:
        return Sweeps(pd.DataFrame(), {}, [])
    read = read_sweeps(places)
    compared_ones = {Path(folder).resolve() for side in sides for folder in side.environments}
    others = read.frame["sweep"].map(lambda folder: Path(folder).resolve() not in compared_ones)
    return replace(read, frame=read.frame[others.astype(bool)])


def _known(option: str, names: Sequence[str], known: Sequence[str], otherwise: str) -> tuple[str, ...]:
    for name in names:
        if name not in known:
            raise QueryError(f"{option}: {name} {otherwise} are {', '.join(known)}")
    return tuple(names)


def _unrepeated(found: Sequence[Comparison]) -> list[Content]:
    """What to type first where costs cannot be compared, since each cell ran once on one side at least."""
    cells = [one.costs[one.costs["level"].eq("cell")] for one in found if len(one.costs)]
    runs = [side[["runs_old", "runs_new"]].max().min() for side in cells if len(side)]
    if not runs or max(runs) > 1:
        return []
    text = "No cell was repeated, so costs cannot be compared: run both sides again with repeats=5"
    return [Content(headline=f"{text} (dcpbench run ... repeats=5).")]


def _environments(differing: pd.DataFrame, damaged: Sequence[str], found: Sequence[Comparison]) -> Content:
    """What was different around the sweeps, and what of them could not be read."""
    text = warning(differing)
    if not text and differing.empty:
        reconfigured = any(len(one.configurations) for one in found)
        but = "; configurations are not, see below" if reconfigured else ""
        text = f"The environments are the same{but}."
    tables = [Table("environment", differing)] if len(differing) else []
    return Content(tables, damaged=first_of(damaged), headline=text)


def _statuses(compared: Comparison, every: bool) -> Content:
    """The cells whose status changed, those to look at first before the others."""
    changed = compared.statuses[compared.statuses["change"] != SAME]
    first = changed if every else changed.groupby("change", sort=False).head(_MOST_OF_A_KIND)
    shown = first[first["change"] != OTHER_CONFIGURATION]
    left = int((changed["change"] != OTHER_CONFIGURATION).sum()) - len(shown)
    table = pd.concat([shown["change"], _axes(compared, shown["key"]), shown[["old", "new"]]], axis=1)
    return Content(
        [Table(f"verdicts: {compared.name}", table, ("old", "new"))] if len(table) else [],
        of_a_kind(_explained(compared, first)),
        f"and {left} more such changes: --all shows them" if left else "",
        [f"No cell is in both: {compared.apart}"] if compared.apart else [],
        _counts(compared.statuses),
    )


def _configurations(compared: Comparison, every: bool) -> Content:
    """In what the configurations of cells differ; cells that differ in the same are one line."""
    names = dict(zip(compared.cells.index, cell_names(compared.cells), strict=True))
    lines = []
    for (key, old, new), rows in compared.configurations.groupby(["name", "old", "new"], sort=False):
        cells = [names[cell] for cell in rows["key"]]
        listed = cells if every else cells[:_NAMED_CELLS]
        more = f", and {len(cells) - len(listed)} more" if len(cells) > len(listed) else ""
        lines.append((key, f"{old} → {new}", str(len(cells)), ", ".join(listed) + more))
    table = pd.DataFrame(lines, columns=["key", "old → new", "cells", "which"])
    number = compared.configurations["key"].nunique()
    headline = f"{counted(number, 'cell')} of another configuration: neither statuses nor costs are compared."
    return Content([Table(f"configurations: {compared.name}", table)], headline=headline)


def _costs(compared: Comparison, rule: Rule, every: bool) -> Content:
    """What was measured of the costs of the cells in common, and by which rule it was judged."""
    found = compared.costs
    called = found["verdict"].isin(CHANGED)
    groups = found[found["level"].eq("all") | (found["level"].eq("axis") & (called | every))]
    single = found[found["level"].eq("cell") & (called | every)]
    tables = [
        Table(f"{title}: {compared.name}", _cost_table(compared, lines, lines is single), ("verdict",))
        for title, lines in (("costs", groups), ("costs of single cells", single))
        if len(lines)
    ]
    return Content(tables, more=_counted(found), headline=_rule(found, rule, every))


def _axes(compared: Comparison, keys: "pd.Series[str]") -> pd.DataFrame:
    cells = compared.cells.loc[list(keys)]
    return cells[shown_axes(cells)].rename(columns={"others": "overrides"}).set_axis(keys.index)


def _explained(compared: Comparison, shown: pd.DataFrame) -> pd.DataFrame:
    explained = shown[shown["change"].isin(_EXPLAINED) & shown["failing"]]
    return pd.DataFrame(
        {
            "status": explained["change"].to_numpy(),
            "cell": cell_names(compared.cells.loc[list(explained["key"])]),
            "reason": explained["reason"].to_numpy(),
            "again": explained["again"].to_numpy(),
        }
    )


def _counts(statuses: pd.DataFrame) -> str:
    changed = statuses.loc[statuses["change"] != SAME, "change"].value_counts(sort=False)
    compared = changed.drop(OTHER_CONFIGURATION, errors="ignore")
    phrases = [f"{count} {change}" for change, count in compared.items()]
    still = int((statuses["failing"] & statuses["change"].eq(SAME)).sum())
    phrases += [f"{still} still not ok"] if still else []
    listed = f" ({', '.join(phrases)})" if phrases else ""
    other = int(changed.sum() - compared.sum())
    apart = f", {other} with another configuration" if other else ""
    return f"{counted(len(statuses), 'cell')}, {int(compared.sum())} with another status{listed}{apart}"


def _cost_table(compared: Comparison, lines: pd.DataFrame, single: bool) -> pd.DataFrame:
    runs = [lines[side].astype(int).astype(str) for side in ("runs_old", "runs_new")]
    ends = zip(lines["ratio_low"], lines["ratio_high"], strict=True)
    table = pd.DataFrame(
        {
            "metric": lines["metric"],
            "of": lines["name"],
            "cells": lines["cells"].astype(str),
            "runs": runs[0].where(runs[0] == runs[1], runs[0] + " and " + runs[1]),
            **{side: list(map(quantity, lines["metric"], lines[side])) for side in ("old", "new")},
            "ratio": lines["ratio"].map(_ratio),
            "95 % interval": [
                "-" if np.isnan(low) else f"{_ratio(low)} to {_ratio(high)}" for low, high in ends
            ],
            "would see": lines["would_see"].map(_share),
            "verdict": lines["verdict"],
        }
    )
    judged = ["ratio", "95 % interval", "would see"]
    if single:
        measured = table[["old", "new", *judged, "runs", "verdict"]]
        return pd.concat([table["metric"], _axes(compared, lines["key"]), measured], axis=1)
    return table[["metric", "of", "cells", "runs", *judged, "verdict"]].rename(columns={"runs": "rounds"})


def _counted(found: pd.DataFrame) -> str:
    """How many cells have which verdict, metric by metric."""
    cells = found[found["level"].eq("cell")]
    phrases = []
    for metric, lines in cells.groupby("metric", sort=False):
        counted = [f"{count} {verdict}" for verdict, count in lines["verdict"].value_counts().items()]
        phrases.append(f"{metric}: {', '.join(counted)}")
    few = cells[cells["verdict"].eq(TOO_FEW)]
    if len(few):
        runs = few[["runs_old", "runs_new"]].min(axis=1).min()
        phrases.append(
            f"too few runs to say: {runs} on one side; {LEAST_RUNS} are needed, 5 are good (repeats=5)"
        )
    return "Single cells: " + "; ".join(phrases)


def _rule(found: pd.DataFrame, rule: Rule, every: bool) -> str:
    beyond = f"more than the {rule.drift:.0%} that equal sweeps drift apart"
    if found["by_sweep"].any():
        beyond = "not noise, that from sweep to sweep included"
    text = (
        f"slower, faster, larger, smaller: {rule.least_effect:.0%} or more, and a t test on logarithms says "
        f"that it is {beyond}; the chance of any false call in this comparison is held at "
        f"{rule.false_alarms:.2g} (Holm). no change: the interval lies within {rule.least_effect:.0%}. "
        "unclear: neither. would see: the least change that would be called in 9 of 10 comparisons with "
        "this noise."
    )
    whole = found[found["level"].eq("all") & found["verdict"].isin(CHANGED)]
    if len(whole) and not found["by_sweep"].any():
        text = (
            f"{', '.join(whole['metric'])}: all cells moved together. A machine that has changed looks "
            f"alike: run the old side again to tell them apart.\n{text}"
        )
    return text if every else f"{text} --all shows every cell."


def _ratio(value: float) -> str:
    return "-" if np.isnan(value) else f"{value:.3f}" if value < 10 else f"{value:.3g}"


def _share(value: float) -> str:
    return "-" if np.isnan(value) else f"+{value - 1:.0%}" if value < 10 else "×10 or more"
