"""Many cells at a glance: their statuses, or a metric of theirs, by some axes against others."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from pandas.api.typing import DataFrameGroupBy

from dcpbench.analysis.frame import is_false, is_true
from dcpbench.analysis.runs import one_a_cell, severity, status_text
from dcpbench.records.metrics import METRICS
from dcpbench.report.document import Table
from dcpbench.report.labels import byte_unit, entry, plain
from dcpbench.report.summary import shown_metrics, varying

_ROWS = ("sweep", "scenario", "parallel")
_COLUMNS = ("compile", "save")
_LINES = 100


@dataclass(frozen=True)
class Axes:
    """The columns whose values are down the side, and those whose values are along the top."""

    rows: list[str]
    columns: list[str]

    def __str__(self) -> str:
        return " × ".join([*self.rows, *self.columns])


def axes_of(frame: pd.DataFrame, rows: Sequence[str] = (), columns: Sequence[str] = ()) -> Axes:
    """The axes that were asked for; else parallelism, and what varies of sweep, scenario, compile, save.

    Where these would be more than a few screens of lines, scenarios are put together, and then sweeps.
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


def statuses(frame: pd.DataFrame, axes: Axes) -> Table:
    """The statuses of the cells. Where an entry puts several cells together, how many have which, the worst
    first; a planted fault that was seen is `seen`."""
    cells = frame.copy() if "repeat" in (*axes.rows, *axes.columns) else one_a_cell(frame)
    text = status_text(cells).mask(is_true(cells["fault_seen"]), "seen")
    cells["text"] = text.mask(is_false(cells["fault_seen"]), "NOT SEEN")
    cells["rank"] = severity(cells)
    table = _unfolded(cells, axes, "status", _status)
    entries = tuple(table.columns[len(axes.rows) :])
    return Table(f"status by {axes}{_put_together(cells, axes)}", table, entries)


def metric(frame: pd.DataFrame, axes: Axes, name: str) -> Table:
    """The median of a metric over all rows of an entry, and how far they spread."""
    unit, divisor, digits = _unit(name, frame[name])
    measured = frame.assign(value=frame[name].astype("float64") / divisor)
    table = _unfolded(measured, axes, name, lambda rows: _median(rows["value"].dropna(), digits))
    rows = _rows_an_entry(measured.dropna(subset=["value"]), axes)
    title = f"{name} by {axes}: median{unit}{rows}{_put_together(frame, axes)}"
    return Table(title, table)


def costs(frame: pd.DataFrame, axes: Axes) -> Table:
    """Medians of the metrics, a line for each row of the pivot and each way of saving."""
    by = [*axes.rows, *(["save"] if "save" in varying(frame) and "save" not in axes.rows else [])]
    measured = [name for name in shown_metrics(frame) if frame[name].notna().any()]
    groups = frame[measured].groupby([_label(frame[axis]) for axis in by], observed=True)
    table = groups.median()
    for name in measured:
        table[name] = [entry(name, value) for value in table[name]]
    table.insert(0, "rows", groups.size().astype(str))
    return Table("costs: medians in seconds", table.reset_index().astype(str))


def _unfolded(
    frame: pd.DataFrame, axes: Axes, name: str, entry: Callable[[pd.DataFrame], str]
) -> pd.DataFrame:
    """A row for each value of the axes down the side, a column for each of those along the top, or one of
    this name."""
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
        return "", 1, ".4g"
    name, size = byte_unit(0 if values.isna().all() else values.max())
    return f" in {name}", size, ".1f"
