"""The tables of a report with a line for each cell or each planted fault, and its counts."""

from collections.abc import Sequence

import pandas as pd

from dcpbench.analysis.cell_identity import override_words
from dcpbench.analysis.frame import is_false, is_true
from dcpbench.analysis.runs import one_a_cell, runs_text, status_text
from dcpbench.records.checks import CHECKS
from dcpbench.records.metrics import METRICS
from dcpbench.records.row import AXES
from dcpbench.report.labels import entry, mark, plain

_ALWAYS = ("parallel", "compile", "save")


def shown_metrics(frame: pd.DataFrame) -> list[str]:
    """The metrics that have a column in the results table of these rows."""
    shown = {"always": True, "measured": False}
    return [
        name
        for name, spec in METRICS.items()
        if shown.get(spec.shown) or (spec.shown in shown and frame[name].notna().any())
    ]


def summary(frame: pd.DataFrame) -> pd.DataFrame:
    """The results table as text, one row a cell: the axes that vary, the status, the checks, the metrics. Of
    several runs of a cell it is the worst status and the median of each metric."""
    cells = one_a_cell(frame)
    table = pd.DataFrame({axis: cells[axis].map(plain) for axis in varying(cells, _ALWAYS)})
    others = cells["overrides"].map(_others)
    if others.nunique() > 1:
        table["overrides"] = others
    table["status"] = status_text(cells).map(plain)
    if cells["runs"].gt(1).any():
        table["runs"] = runs_text(cells)
    for check, spec in CHECKS.items():
        if cells[check].notna().any():
            table[spec.label] = cells[check].map(mark)
    for metric in shown_metrics(cells):
        table[metric] = [entry(metric, value) for value in cells[metric]]
    return table


def varying(frame: pd.DataFrame, always: Sequence[str] = ()) -> list[str]:
    """The axes in which the rows differ, and those that are shown always."""
    axes = [axis for axis in ("sweep", *AXES) if axis in frame]
    return [axis for axis in axes if axis in always or frame[axis].nunique(dropna=False) > 1]


def headline(frame: pd.DataFrame) -> str:
    """How many cells there are, in how many runs if these are more, and how many have which status."""
    cells = len(one_a_cell(frame))
    runs = f" in {len(frame)} runs" if len(frame) > cells else ""
    return f"{cells} cells{runs}: {counts(frame)}" if cells else "0 cells: no rows yet"


def counts(frame: pd.DataFrame) -> str:
    """How many rows have which status, as one phrase."""
    phrases = [f"{number} {plain(status)}" for status, number in frame["status"].value_counts().items()]
    if flaky := is_true(frame["flaky"]).sum():
        phrases.append(f"{flaky} flaky")
    if frame["fault_seen"].notna().any():
        phrases.append(f"{_rate(frame['fault_seen'])} faults seen")
    return ", ".join(phrases)


def detection(frame: pd.DataFrame) -> pd.DataFrame:
    """Of each planted fault how it was seen under each parallelism, and of all of them how many were.

    A status where it was seen, NO where it was not in some cell, `-` where it does not apply; `seen by`
    has the checks that reported it. Empty where no fault was planted.
    """
    planted = frame[frame["fault"].notna() & frame["fault_seen"].notna()]
    if planted.empty:
        return pd.DataFrame()
    parallelisms = list(dict.fromkeys(planted["parallel"].dropna()))
    lines = []
    for fault, rows in [*planted.groupby("fault"), ("all of them", planted)]:
        under = [rows[rows["parallel"] == parallel] for parallel in parallelisms]
        entry_of = _detected if fault != "all of them" else lambda one: _rate(one["fault_seen"])
        lines.append([fault, *map(entry_of, under), _rate(rows["fault_seen"]), _seen_by(rows)])
    return pd.DataFrame(lines, columns=["fault", *parallelisms, "seen", "seen by"])


def _detected(rows: pd.DataFrame) -> str:
    if rows.empty:
        return "-"
    return "NO" if is_false(rows["fault_seen"]).any() else " ".join(sorted(set(rows["status"])))


def _rate(seen: "pd.Series[bool]") -> str:
    return f"{is_true(seen).sum()} of {seen.notna().sum()}"


def _seen_by(rows: pd.DataFrame) -> str:
    checks = [spec.label for check, spec in CHECKS.items() if is_false(rows[check]).any()]
    return ", ".join([*checks, *(["error"] if rows["status"].eq("error").any() else [])])


def _others(overrides: object) -> str:
    """The overrides that no axis column shows."""
    return " ".join(word for word in override_words(overrides) if word.partition("=")[0] not in AXES)
