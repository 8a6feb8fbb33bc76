"""What is shown of sweeps: their cells one by one or as a pivot, and what did not pass."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pandas as pd

from dcpbench.analysis.frame import Sweeps, short_names
from dcpbench.analysis.query import Condition, select
from dcpbench.analysis.runs import failures, of_a_kind
from dcpbench.report import pivot
from dcpbench.report.document import Content, Table, first_of
from dcpbench.report.summary import detection, headline, summary

MOST_CELLS = 50
"""More than so many cells are shown as a pivot: a line for each would be more than a screen."""

_MOST_KINDS = 20


@dataclass(frozen=True)
class View:
    """What is asked of a report. Rows, columns or metrics ask for a pivot, `cells` for a line a cell; with
    none of them it is a line a cell up to `MOST_CELLS`, and a pivot beyond."""

    where: tuple[Condition, ...] = ()
    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()
    cells: bool = False

    @property
    def is_pivot(self) -> bool:
        """Whether a pivot is asked for."""
        return bool(self.rows or self.columns or self.metrics)


def content(sweeps: Sweeps, view: View = View()) -> Content:
    """What a report of these sweeps says."""
    frame = shown(sweeps, view.where).frame
    tables, by_cell = _tables(frame, view)
    listed = of_a_kind(failures(frame), each=by_cell)
    first = listed if by_cell else listed.groupby(listed["again"].eq("")).head(_MOST_KINDS)
    left = len(listed) - len(first)
    return Content(
        [table for table in tables if len(table.table)],
        first,
        f"and {left} more kinds of reasons: --cells shows all of them" if left else "",
        first_of(sweeps.left_out),
        _headline(frame, len(sweeps.frame) if view.where else None),
    )


def shown(sweeps: Sweeps, where: Sequence[Condition] = ()) -> Sweeps:
    """The rows that are meant, their sweeps called by names that just tell them apart."""
    names = short_names(sweeps.environments)
    frame = sweeps.frame.assign(sweep=sweeps.frame["sweep"].map(names).astype("string"))
    environments = {names[folder]: known for folder, known in sweeps.environments.items()}
    return replace(sweeps, frame=select(frame, where), environments=environments)


def _tables(frame: pd.DataFrame, view: View) -> tuple[list[Table], bool]:
    """The tables, and whether they have a line for each cell."""
    if view.is_pivot:
        return _pivots(frame, view), False
    not_planted = frame[frame["fault_seen"].isna()]
    listed = summary(not_planted)
    if view.cells or len(listed) <= MOST_CELLS:
        return [Table("", listed, ("status",)), Table("", detection(frame))], True
    return [*_pivots(not_planted, view), Table("", detection(frame))], False


def _pivots(frame: pd.DataFrame, view: View) -> list[Table]:
    if frame.empty:
        return []
    axes = pivot.axes_of(frame, view.rows, view.columns)
    if view.metrics:
        return [pivot.metric(frame, axes, name) for name in view.metrics]
    return [pivot.statuses(frame, axes), pivot.costs(frame, axes)]


def _headline(frame: pd.DataFrame, rows: int | None) -> str:
    across = f"{count} sweeps, " if (count := frame["sweep"].nunique()) > 1 else ""
    return across + headline(frame) + (f" ({len(frame)} of {rows} rows)" if rows is not None else "")
