"""`dcpbench report <sweep>...`: cells one by one or as a pivot, and what did not pass."""

import io
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

import pandas as pd

from dcpbench.analysis.frame import Sweeps, read_sweeps, row_noun, without_retries
from dcpbench.analysis.query import (
    Condition,
    QueryError,
    known_column,
    known_metric,
    parse_condition,
    select_rows,
    split_names,
)
from dcpbench.analysis.runs import failures, grouped_failures, remarks
from dcpbench.config.text import counted, done_text
from dcpbench.records.row import NESTED
from dcpbench.records.store import ResultsError, write_whole
from dcpbench.report.document import (
    Content,
    Table,
    document_text,
    first_sentences,
    format_of,
    render,
    rows_text,
    write_output,
)
from dcpbench.report.junit import junit
from dcpbench.report.page import page
from dcpbench.report.styles import print_error
from dcpbench.report.tables import (
    cost_pivot,
    detection,
    headline,
    metric_pivot,
    pivot_axes,
    shown_metrics,
    status_pivot,
    summary,
    varying,
)

MOST_CELLS = 50
"""More cells than this are shown as a pivot: one line for each would be more than a screen."""

_MOST_KINDS = 20
_WHERE_TO_LOOK = {
    "cell": "in full: report.html, dcpbench show FOLDER CELL; logs: rank*.log in the folder of each cell",
    "stop": "in full: report.html, and issue.md in the folder of each stop",
}
_FORMATS = {
    ".txt": "table",
    ".md": "markdown",
    ".csv": "csv",
    ".json": "json",
    ".html": "html",
}
_ROWS_ALONE = ("csv", "json")
"""The formats that cannot report damage."""


@dataclass(frozen=True)
class View:
    """The requested view: a pivot, one line per cell (`cells`), or either, by the number of cells."""

    where: tuple[Condition, ...] = ()
    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()
    cells: bool = False

    @property
    def is_pivot(self) -> bool:
        """Whether a pivot was requested."""
        return bool(self.rows or self.columns or self.metrics)


def main(
    sweeps: Sequence[Path],
    where: Sequence[str] = (),
    rows: Sequence[str] = (),
    columns: Sequence[str] = (),
    metric: Sequence[str] = (),
    cells: bool = False,
    format: str | None = None,
    output: Path | None = None,
) -> int:
    """Show sweeps; raise ResultsError if they cannot be read or written."""
    view = View(
        where=tuple(map(parse_condition, where)),
        rows=_names(rows, "--rows"),
        columns=_names(columns, "--columns"),
        metrics=tuple(map(known_metric, split_names(metric))),
        cells=cells,
    )
    if view.cells and view.is_pivot:
        raise QueryError(
            "--cells: prints one line per cell, and --rows, --columns and --metric print a pivot; choose one"
        )
    written_as = format_of(format, output, _FORMATS)
    read = read_sweeps(sweeps)
    left = read.not_run()
    if read.frame.empty:
        count = sum(map(len, left.values()))
        why = "; ".join([f"{counted(count, 'cell')} to run"] * bool(count) + first_sentences(read.left_out))
        raise ResultsError(f"{', '.join(map(str, sweeps))}: no row yet{why and f': {why}'}")
    file = io.StringIO() if output else sys.stdout
    write_output(_text(read, view, written_as, file), output)
    if where and _shown(read, view.where).frame.empty:
        print_error(f"--where: none of {len(read.frame)} rows meets every condition")
    for folder, cells_left in left.items():
        if cells_left:
            done = int(read.frame["sweep"].eq(folder).sum())
            print_error(f"{folder}: {done_text(done, done + len(cells_left))}")
    if written_as in _ROWS_ALONE:
        for sentence in first_sentences(read.left_out):
            print_error(sentence)
    return 0


def epilog() -> str:
    """Return the end of the help text."""
    return f"""\
Up to {MOST_CELLS} cells are shown one per line, failed ones first, and more as a pivot. --rows, --columns
and --metric print a pivot, --cells one line per cell. Runs of one cell (repeats=N) are one line with
their worst status and median times. -o page.html writes the page, of several sweeps with their names."""


def write_reports(folder: Path, place: Path | None, sweep: Sweeps | None = None) -> None:
    """Write `report.html` and `junit.xml` of a sweep, compared with the one before it, in `place`.

    Args:
        sweep: the sweep in the folder, if it has been read.

    Raises:
        dcpbench.records.store.ResultsError: the folder has no results, or a file cannot be written.
    """
    sweeps = sweep or read_sweeps([folder])
    text = page(sweeps, folder.resolve().name, _read(place))
    write_whole(folder / "report.html", [text.encode()])
    write_whole(folder / "junit.xml", [junit(sweeps).encode()])


def print_report(sweep: Sweeps) -> None:
    """Print a sweep's table and what did not pass; raise ResultsError if that fails."""
    write_output(render(report_content(sweep), sys.stdout), None)


def report_content(sweeps: Sweeps, view: View = View()) -> Content:
    """Return the tables, failures and sentences of a report."""
    frame = _shown(sweeps, view.where).frame
    if all(condition.column != "retry_of" for condition in view.where):
        frame = without_retries(frame)
    tables, by_cell = _tables(frame, view)
    listed = grouped_failures(failures(frame))
    first = listed if by_cell else listed.groupby(listed["again"].eq("")).head(_MOST_KINDS)
    left = len(listed) - len(first)
    more = [f"and {left} more kinds of failures; pass --cells to list them"] if left else []
    more += [_WHERE_TO_LOOK[row_noun(frame)]] if first["again"].ne("").any() else []
    more += [*sweeps.shared_gpus(frame), *remarks(frame)]
    across = f"{count} sweeps, " if (count := frame["sweep"].nunique()) > 1 else ""
    of = f" ({len(frame)} of {len(sweeps.frame)} rows)" if view.where else ""
    return Content(
        [table for table in tables if len(table.table)],
        first,
        "\n".join(more),
        first_sentences(sweeps.left_out),
        f"{across}{headline(frame, 0 if view.where else sum(map(len, sweeps.not_run().values())))}{of}",
    )


def _names(given: Sequence[str], option: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(known_column(name, option) for name in split_names(given)))


def _text(sweeps: Sweeps, view: View, written_as: str, file: TextIO) -> str:
    if written_as in ("table", "markdown"):
        return document_text([report_content(sweeps, view)], written_as, file)
    chosen = _shown(sweeps, view.where)
    if written_as == "html":
        before = None
        if len(sweeps.environments) == 1 and not view.where:
            from dcpbench.analysis.cell_identity import sweep_before

            before = _read(sweep_before(Path(*sweeps.environments), sweeps.frame))
        return page(chosen, ", ".join(chosen.environments), before)
    return rows_text(chosen.frame.drop(columns=[*NESTED]), written_as)


def _read(folder: Path | None) -> Sweeps | None:
    with suppress(ResultsError):  # another user may own the folder
        return read_sweeps([folder]) if folder else None
    return None


def _shown(sweeps: Sweeps, where: Sequence[Condition]) -> Sweeps:
    """Return the selected rows, with the shortest names that distinguish their sweeps. Of a selection no cell
    is missing."""
    named = sweeps.with_short_names()
    if not where:
        return named
    return replace(named, frame=select_rows(named.frame, where), sweep_records={})


def _tables(frame: pd.DataFrame, view: View) -> tuple[list[Table], bool]:
    """Return the tables, and whether they have one line per cell."""
    if view.is_pivot:
        return _pivots(frame, view), False
    without_faults = frame[frame["fault_seen"].isna()]
    listed = summary(without_faults)
    injected = Table("", detection(frame))
    if view.cells or len(listed.table) <= MOST_CELLS:
        return [listed, injected], True
    return [*_pivots(without_faults, view), injected], False


def _pivots(frame: pd.DataFrame, view: View) -> list[Table]:
    if frame.empty:
        return []
    axes = pivot_axes(frame, view.rows, view.columns)
    if view.metrics:
        by_model = "model" in varying(frame) and not view.rows and "model" not in axes.columns
        axes = replace(axes, rows=[*axes.rows, "model"]) if by_model else axes
        return [metric_pivot(frame, axes, name) for name in view.metrics]
    return [status_pivot(frame, axes), *([cost_pivot(frame, axes)] if shown_metrics(frame) else [])]
