"""The tables of a report: one line per cell or injected fault, a pivot of many cells, and counts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from pandas.api.typing import DataFrameGroupBy

from dcpbench.analysis.cell_identity import override_words
from dcpbench.analysis.differing import axes_that_differ, common_overrides, other_overrides
from dcpbench.analysis.frame import as_expected, is_false, is_true, plain_rows, row_noun
from dcpbench.analysis.runs import failed_checks, one_per_cell, runs_text, severity, status_text
from dcpbench.config.text import byte_unit, cells_text
from dcpbench.core.axes import AXES
from dcpbench.core.checks import CHECKS
from dcpbench.core.metrics import METRICS
from dcpbench.core.statuses import SHOWN
from dcpbench.records.row import dict_in
from dcpbench.report.document import Table, axis_text, checks_text, column_entry

_ALWAYS = [spec.name for spec in AXES.values() if spec.always]
_ROWS = ["sweep", *(spec.name for spec in AXES.values() if spec.pivot == "rows")]
_COLUMNS = [spec.name for spec in AXES.values() if spec.pivot == "columns"]
_LINES = 100


def shown_metrics(frame: pd.DataFrame) -> list[str]:
    """Return the metrics of the results table that were measured in any row."""
    return [name for name, spec in METRICS.items() if spec.shown != "asked" and frame[name].notna().any()]


def summary(frame: pd.DataFrame) -> Table:
    """Return the results table, one line per cell, failed cells first; the title has what all cells share."""
    cells = one_per_cell(frame)
    cells = cells.assign(place=severity(cells).where(~as_expected(cells), len(SHOWN)))
    cells = cells.sort_values("place", kind="stable", ignore_index=True)
    is_of_script = row_noun(frame) == "stop"
    title, table = _of_script(cells) if is_of_script else split_common_axes(cells)
    table["status"] = status_text(cells).map(axis_text)
    runs = runs_text(cells)
    if runs.nunique() > 1 or cells["agreeing_runs"].ne(cells["runs"]).any():
        table["runs"] = runs.str.removesuffix(" runs").replace("", "1")
        timed = cells["timed_runs"]
        some = timed.between(1, cells["runs"] - 1)
        table["runs"] += timed.map(lambda number: f", {number} timed").where(some, "")
    if not is_of_script:
        table["checks"] = [checks_text(values) for values in plain_rows(cells[[*CHECKS]])]
    for metric in shown_metrics(cells):
        table[metric] = [column_entry(metric, value) for value in cells[metric]]
    return Table(title, table, ("status",))


def _of_script(cells: pd.DataFrame) -> tuple[str, pd.DataFrame]:
    """Return the command of a script, as a title, and a table of the stops."""
    command = dict_in(cells["config"][0]).get("script.command", "")
    return f"all stops: {command}", pd.DataFrame({"stop": cells["cell"].str.removeprefix("stop=")})


def split_common_axes(cells: pd.DataFrame) -> tuple[str, pd.DataFrame]:
    """Return what all cells share, as a title, and a table of the axes and other overrides in which they
    differ. Of a cell only axes and `overrides` are used."""
    axes = varying(cells)
    table = pd.DataFrame({axis: _texts(cells[axis]) for axis in axes}, index=cells.index)
    words = [override_words(line) for line in cells["overrides"]]
    if any(others := other_overrides(words)):
        table["overrides"] = others
    shared = common_overrides(words)
    common = [f"{axis}={axis_text(cells[axis][0])}" for axis in _ALWAYS if words and axis not in axes]
    common += [
        word for word in next(iter(words), []) if word in shared and word.partition("=")[0] not in _ALWAYS
    ]
    return f"all cells: {' '.join(common)}" if common else "", table


def varying(frame: pd.DataFrame) -> list[str]:
    """Return the axes in which the rows differ."""
    return axes_that_differ({axis: [*frame[axis]] for axis in ("sweep", *AXES) if axis in frame})


def headline(frame: pd.DataFrame, left: int = 0) -> str:
    """Count cells, runs if there are more of them, and statuses, and how many cells are `left`."""
    cells = len(one_per_cell(frame))
    more = f", {left:,} left" if left else ""
    if not cells:
        return "0 cells: no rows yet"
    return f"{cells_text(cells, len(frame), row_noun(frame))}: {counts(frame)}{more}"


def counts(frame: pd.DataFrame) -> str:
    """Count the rows of each status, and the injected faults that were detected."""
    statuses = frame.loc[frame["fault_seen"].isna(), "status"]
    phrases = [f"{number} {axis_text(status)}" for status, number in statuses.value_counts().items()]
    if flaky := is_true(frame["flaky"]).sum():
        phrases.append(f"{flaky} flaky")
    if frame["fault_seen"].notna().any():
        phrases.append(f"{_rate(frame['fault_seen'])} faults detected")
    return ", ".join(phrases)


def detection(frame: pd.DataFrame) -> pd.DataFrame:
    """Return for each injected fault its status under each parallelism, how many cells detected it, and by
    which checks. `NO`: some cell did not detect it; `-`: it does not apply."""
    chosen = frame["fault"].notna() & frame["fault_seen"].notna()
    injected = frame.loc[chosen, ["fault", "fault_seen", "parallel", "status", *CHECKS]]
    if injected.empty:
        return pd.DataFrame()
    parallelisms = list(dict.fromkeys(injected["parallel"].dropna()))
    lines = []
    for fault, rows in [*injected.groupby("fault"), ("all of them", injected)]:
        entries = []
        for part in (rows[rows["parallel"] == parallel] for parallel in parallelisms):
            statuses = " ".join(sorted(set(part["status"]))) or "-"
            worst = "NO" if is_false(part["fault_seen"]).any() else statuses
            entries.append(_rate(part["fault_seen"]) if rows is injected else worst)
        detecting = {name for row in plain_rows(rows) for name in failed_checks(row)}
        checks = ", ".join(name for name in (*CHECKS, "error") if name in detecting)
        lines.append([fault, *entries, _rate(rows["fault_seen"]), checks])
    return pd.DataFrame(lines, columns=["fault", *parallelisms, "detected", "detected by"])


def _rate(detected: "pd.Series[bool]") -> str:
    return f"{is_true(detected).sum()} of {detected.notna().sum()}"


@dataclass(frozen=True)
class Axes:
    """The columns of a pivot: `rows` down its side, `columns` along its top."""

    rows: list[str]
    columns: list[str]

    def __str__(self) -> str:
        return " × ".join([*self.rows, *self.columns])


def pivot_axes(frame: pd.DataFrame, rows: Sequence[str] = (), columns: Sequence[str] = ()) -> Axes:
    """Return the axes of a pivot: the requested ones, else parallelism, and sweep, scenario, compile mode and
    save mode where they vary. Scenarios, then sweeps, are combined if the pivot would have too many lines."""
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
    """Return the statuses of the cells, the worst first; a detected fault is `detected`."""
    cells = frame.copy() if "repeat" in (*axes.rows, *axes.columns) else one_per_cell(frame)
    text = status_text(cells).mask(is_true(cells["fault_seen"]), "detected")
    cells["text"] = text.mask(is_false(cells["fault_seen"]), "NOT DETECTED")
    cells["rank"] = severity(cells)
    table = _unfolded(cells, axes, "status", _status)
    entries = tuple(table.columns[len(axes.rows) :])
    return Table(f"status by {axes}{_combined(cells, axes)}", table, entries)


def metric_pivot(frame: pd.DataFrame, axes: Axes, name: str) -> Table:
    """Return the median of a metric over the rows of each entry, and their spread."""
    unit, divisor, digits = _unit(name, frame[name])
    measured = frame.assign(value=frame[name].astype("float64") / divisor)
    table = _unfolded(measured, axes, name, lambda rows: _median(rows["value"].dropna(), digits))
    rows = _rows_an_entry(measured.dropna(subset=["value"]), axes)
    return Table(f"{name} by {axes}: median{unit}{rows}{_combined(frame, axes)}", table)


def cost_pivot(frame: pd.DataFrame, axes: Axes) -> Table:
    """Return medians over cells, one line for each row of the pivot, model and save mode."""
    cells = one_per_cell(frame)
    vary = varying(cells)
    by = [*axes.rows, *(axis for axis in ("model", "save") if axis in vary and axis not in axes.rows)]
    measured = shown_metrics(cells)
    groups = cells[measured].groupby([_label(cells[axis]) for axis in by], observed=True)
    table = groups.median()
    for name in measured:
        table[name] = [column_entry(name, value) for value in table[name]]
    table.insert(0, "cells", groups.size().astype(str))
    return Table("costs: medians over cells, in seconds", table.reset_index().astype(str))


def _unfolded(
    frame: pd.DataFrame, axes: Axes, name: str, entry_of: Callable[[pd.DataFrame], str]
) -> pd.DataFrame:
    """Return a row for each value down the side and a column for each along the top, or one called `name`."""
    entries = _grouped(frame, axes).apply(entry_of)
    if not axes.columns:
        return entries.rename(name).reset_index().astype(str)
    table = entries.unstack(axes.columns).fillna("")
    table.columns = [_head(axes.columns, top if isinstance(top, tuple) else (top,)) for top in table.columns]
    return table.reset_index().astype(str)


def _grouped(frame: pd.DataFrame, axes: Axes) -> "DataFrameGroupBy[Any, Any]":
    """Group the rows by their values, in the order of the values."""
    names = [*axes.rows, *axes.columns]
    return frame.assign(**{axis: _label(frame[axis]) for axis in names}).groupby(names, observed=True)


def _label(column: "pd.Series[Any]") -> "pd.Series[Any]":
    """Return the values as ordered text: numbers by size, others as they come."""
    values = column.dropna().unique()
    known = sorted(values) if column.dtype in ("Int64", "float64") else list(values)
    texts = dict.fromkeys(map(axis_text, [*known, *column[column.isna()].head(1)]))
    return _texts(column).astype(pd.CategoricalDtype(list(texts), ordered=True))


def _texts(column: "pd.Series[Any]") -> "pd.Series[Any]":
    """Return the values as text. `Series.map` of pandas 2 makes floats of integers if one is null."""
    return pd.Series([*map(axis_text, column)], column.index, object, column.name)


def _head(axes: list[str], values: tuple[str, ...]) -> str:
    """Return the head of a column; numbers and booleans have the name of their axis."""
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


def _combined(frame: pd.DataFrame, axes: Axes) -> str:
    others = [axis for axis in varying(frame) if axis not in (*axes.rows, *axes.columns)]
    return f"; each entry counts all values of {', '.join(others)}" if others else ""


def _unit(name: str, values: "pd.Series[float]") -> tuple[str, float, str]:
    """Return the unit of a column of numbers, its divisor, and its format."""
    unit = METRICS[name].unit if name in METRICS else ""
    if unit == "s":
        return " in seconds", 1, ".3f"
    if unit != "bytes":
        return "", 1, ",.0f" if values.max() >= 1000 else ".4g"
    name, size = byte_unit(0 if values.isna().all() else values.max())
    return f" in {name}", size, ".1f"
