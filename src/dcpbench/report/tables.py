"""The tables of a report: a line for each cell or planted fault, or a pivot of many cells, and counts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from pandas.api.typing import DataFrameGroupBy

from dcpbench.analysis.cell_identity import override_words, shown_by_axes
from dcpbench.analysis.frame import is_false, is_true, ok, records
from dcpbench.analysis.runs import one_a_cell, runs_text, seen_by, severity, status_text
from dcpbench.config.text import counted
from dcpbench.core.axes import AXES
from dcpbench.core.checks import CHECKS
from dcpbench.core.metrics import METRICS
from dcpbench.core.statuses import SHOWN
from dcpbench.report.document import Table
from dcpbench.report.labels import byte_unit, checks_text, entry, plain

_ALWAYS = [spec.name for spec in AXES.values() if spec.always]
_ROWS = ["sweep", *(spec.name for spec in AXES.values() if spec.pivot == "rows")]
_COLUMNS = [spec.name for spec in AXES.values() if spec.pivot == "columns"]
_LINES = 100


def shown_metrics(frame: pd.DataFrame) -> list[str]:
    """Return the metrics of the results table that were measured in any row."""
    return [name for name, spec in METRICS.items() if spec.shown != "asked" and frame[name].notna().any()]


def summary(frame: pd.DataFrame) -> Table:
    """Return the results table, one line per cell, failed cells first; the title has what all cells share."""
    cells = one_a_cell(frame)
    cells = cells.assign(place=severity(cells).where(~ok(cells), len(SHOWN)))
    cells = cells.sort_values("place", kind="stable", ignore_index=True)
    axes = varying(cells)
    table = pd.DataFrame({axis: cells[axis].map(plain) for axis in axes}, index=cells.index)
    words = cells["overrides"].map(override_words)
    shared = set.intersection(*map(set, words)) if len(words) else set()
    others = words.map(lambda of: " ".join(word for word in of if word not in shared and not _is_axis(word)))
    if others.ne("").any():
        table["overrides"] = others
    table["status"] = status_text(cells).map(plain)
    runs = runs_text(cells)
    if runs.nunique() > 1 or cells["agreeing_runs"].ne(cells["runs"]).any():
        table["runs"] = runs
    table["checks"] = [checks_text(values) for values in records(cells[[*CHECKS]])]
    for metric in shown_metrics(cells):
        table[metric] = [entry(metric, value) for value in cells[metric]]
    common = [f"{axis}={plain(cells[axis][0])}" for axis in _ALWAYS if len(cells) and axis not in axes]
    first = words[0] if len(words) else []
    common += [word for word in first if word in shared and word.partition("=")[0] not in _ALWAYS]
    return Table(f"all cells: {' '.join(common)}" if common else "", table, ("status",))


def varying(frame: pd.DataFrame) -> list[str]:
    """Return the axes in which the rows differ."""
    axes = [axis for axis in ("sweep", *AXES) if axis in frame]
    return [axis for axis in axes if frame[axis].nunique(dropna=False) > 1]


def headline(frame: pd.DataFrame) -> str:
    """How many cells there are, in how many runs if these are more, and how many have which status."""
    cells = len(one_a_cell(frame))
    runs = f" in {len(frame)} runs" if len(frame) > cells else ""
    return f"{counted(cells, 'cell')}{runs}: {counts(frame)}" if cells else "0 cells: no rows yet"


def counts(frame: pd.DataFrame) -> str:
    """How many rows have which status, as one phrase; of planted faults how many were seen."""
    own = frame.loc[frame["fault_seen"].isna(), "status"]
    phrases = [f"{number} {plain(status)}" for status, number in own.value_counts().items()]
    if flaky := is_true(frame["flaky"]).sum():
        phrases.append(f"{flaky} flaky")
    if frame["fault_seen"].notna().any():
        phrases.append(f"{_rate(frame['fault_seen'])} faults seen")
    return ", ".join(phrases)


def detection(frame: pd.DataFrame) -> pd.DataFrame:
    """Of each planted fault how it was seen under each parallelism, by which checks, and how many were.

    A status where it was seen, NO where it was not in some cell, `-` where it does not apply.
    """
    chosen = frame["fault"].notna() & frame["fault_seen"].notna()
    planted = frame.loc[chosen, ["fault", "fault_seen", "parallel", "status", *CHECKS]]
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
    found = {name for row in records(rows) for name in seen_by(row)}
    return ", ".join(name for name in (*CHECKS, "error") if name in found)


def _is_axis(word: str) -> bool:
    return shown_by_axes(word.partition("=")[0])


@dataclass(frozen=True)
class Axes:
    """The columns whose values are down the side, and those whose values are along the top."""

    rows: list[str]
    columns: list[str]

    def __str__(self) -> str:
        return " × ".join([*self.rows, *self.columns])


def pivot_axes(frame: pd.DataFrame, rows: Sequence[str] = (), columns: Sequence[str] = ()) -> Axes:
    """The axes that were asked for; else parallelism, and what varies of sweep, scenario, compile, save.

    Of more than a few screens of lines, scenarios are put together, and then sweeps.
    """
    vary = varying(frame)
    top = list(columns) or [axis for axis in _COLUMNS if axis in vary and axis not in rows]
    side = list(rows)
    if not side:
        side = [axis for axis in _ROWS if (axis in vary or axis == "parallel") and axis not in top]
        for axis in ("scenario", "sweep"):
            if axis in side[:-1] and len(frame[side].drop_duplicates()) > _LINES:
                side.remove(axis)
    return Axes(side or [_ROWS[0]], [axis for axis in top if axis not in side])


def status_pivot(frame: pd.DataFrame, axes: Axes) -> Table:
    """The statuses of the cells, the worst first; a planted fault that was seen is `seen`."""
    cells = frame.copy() if "repeat" in (*axes.rows, *axes.columns) else one_a_cell(frame)
    text = status_text(cells).mask(is_true(cells["fault_seen"]), "seen")
    cells["text"] = text.mask(is_false(cells["fault_seen"]), "NOT SEEN")
    cells["rank"] = severity(cells)
    table = _unfolded(cells, axes, "status", _status)
    entries = tuple(table.columns[len(axes.rows) :])
    return Table(f"status by {axes}{_put_together(cells, axes)}", table, entries)


def metric_pivot(frame: pd.DataFrame, axes: Axes, name: str) -> Table:
    """The median of a metric over all rows of an entry, and how far they spread."""
    unit, divisor, digits = _unit(name, frame[name])
    measured = frame.assign(value=frame[name].astype("float64") / divisor)
    table = _unfolded(measured, axes, name, lambda rows: _median(rows["value"].dropna(), digits))
    rows = _rows_an_entry(measured.dropna(subset=["value"]), axes)
    title = f"{name} by {axes}: median{unit}{rows}{_put_together(frame, axes)}"
    return Table(title, table)


def cost_pivot(frame: pd.DataFrame, axes: Axes) -> Table:
    """Return medians over cells, one line for each row of the pivot, model and save mode."""
    cells = one_a_cell(frame)
    vary = varying(cells)
    by = [*axes.rows, *(axis for axis in ("model", "save") if axis in vary and axis not in axes.rows)]
    measured = shown_metrics(cells)
    groups = cells[measured].groupby([_label(cells[axis]) for axis in by], observed=True)
    table = groups.median()
    for name in measured:
        table[name] = [entry(name, value) for value in table[name]]
    table.insert(0, "cells", groups.size().astype(str))
    return Table("costs: medians over cells, in seconds", table.reset_index().astype(str))


def _unfolded(
    frame: pd.DataFrame, axes: Axes, name: str, entry: Callable[[pd.DataFrame], str]
) -> pd.DataFrame:
    """A row for each value of the axes down the side, a column for each along the top, else `name`."""
    entries = _grouped(frame, axes).apply(entry)
    if not axes.columns:
        return entries.rename(name).reset_index().astype(str)
    table = entries.unstack(axes.columns).fillna("")
    table.columns = [_head(axes.columns, top if isinstance(top, tuple) else (top,)) for top in table.columns]
    return table.reset_index().astype(str)


def _grouped(frame: pd.DataFrame, axes: Axes) -> "DataFrameGroupBy[Any, Any]":
    """The rows of each combination of values, in the order of the values."""
    names = [*axes.rows, *axes.columns]
    return frame.assign(**{axis: _label(frame[axis]) for axis in names}).groupby(names, observed=True)


def _label(column: "pd.Series[Any]") -> "pd.Series[Any]":
    """The values as text, numbers in their order and others in the order in which they come."""
    values = column.dropna().unique()
    known = sorted(values) if column.dtype in ("Int64", "float64") else list(values)
    texts = dict.fromkeys(map(plain, [*known, *column[column.isna()].head(1)]))
    return column.map(plain, na_action=None).astype(pd.CategoricalDtype(list(texts), ordered=True))


def _head(axes: list[str], values: tuple[str, ...]) -> str:
    """The head of a column: a value that does not speak for itself comes with the name of its axis."""
    return "\n".join(
        value if value[:1].isalpha() and value not in ("true", "false") else f"{axis}={value}"
        for axis, value in zip(axes, values, strict=True)
    )


def _status(cells: pd.DataFrame) -> str:
    kinds = cells.sort_values("rank", kind="stable")["text"].value_counts(sort=False)
    if len(cells) == 1:
        return str(kinds.index[0])
    return ", ".join(f"{number} {kind}" for kind, number in kinds.items())


def _median(values: "pd.Series[float]", digits: str) -> str:
    if values.empty:
        return "-"
    median = f"{values.median():{digits}}"
    if len(values) == 1:
        return median
    return f"{median} ±{(values.quantile(0.75) - values.quantile(0.25)) / 2:{digits}}"


def _rows_an_entry(measured: pd.DataFrame, axes: Axes) -> str:
    sizes = _grouped(measured, axes).size()
    if sizes.empty:
        return ", nowhere measured"
    if max(sizes) == 1:
        return ""
    rows = f"{min(sizes)}" if min(sizes) == max(sizes) else f"{min(sizes)} to {max(sizes)}"
    return f" ± half the interquartile range of {rows} rows"


def _put_together(frame: pd.DataFrame, axes: Axes) -> str:
    others = [axis for axis in varying(frame) if axis not in (*axes.rows, *axes.columns)]
    return f"; an entry puts together cells that differ in {', '.join(others)}" if others else ""


def _unit(name: str, values: "pd.Series[float]") -> tuple[str, float, str]:
    """The unit of a column of numbers, what to divide by for it, and how many digits are shown."""
    unit = METRICS[name].unit if name in METRICS else ""
    if unit == "s":
        return " in seconds", 1, ".3f"
    if unit != "bytes":
        return "", 1, ",.0f" if values.max() >= 1000 else ".4g"
    name, size = byte_unit(0 if values.isna().all() else values.max())
    return f" in {name}", size, ".1f"
