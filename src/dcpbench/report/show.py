"""`python -m dcpbench.report <sweep>...`: the tables again, from the rows, on whatever they are wanted."""

import argparse
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

from dcpbench.analysis.frame import Sweeps, read_sweeps, records
from dcpbench.analysis.query import QueryError, known_column, known_metric, names_in, parse
from dcpbench.records.store import RESULTS_JSONL
from dcpbench.report.document import MOST_CELLS, View, content, first_of, shown
from dcpbench.report.files import write_reports
from dcpbench.report.junit import junit
from dcpbench.report.markdown import markdown
from dcpbench.report.output import add_output, format_of, put_out
from dcpbench.report.page import page
from dcpbench.report.terminal import rendered

_SUFFIXES = {
    ".md": "markdown",
    ".csv": "csv",
    ".json": "json",
    ".html": "html",
    ".xml": "junit",
    ".txt": "table",
}

_ROWS_ALONE = ("csv", "json", "junit")
"""The formats that have no place for what is damaged."""

_EPILOG = f"""\
Up to {MOST_CELLS} cells are shown one a line, more as a pivot; --rows, --columns and --metric ask for
a pivot, --cells for a line a cell. Runs of one cell (repeats=N) are one line: their worst
status, their median times. Without --format and -o, report.html and junit.xml in the folder of
a single sweep are made again.
"""


def main(arguments: list[str]) -> int:
    """Show sweeps.

    Raises:
        ResultsError: one of the folders holds no results, or what was asked makes no sense.
    """
    asked = _parser().parse_args(arguments)
    view = View(
        where=tuple(map(parse, asked.where)),
        rows=_names(asked.rows, "--rows"),
        columns=_names(asked.columns, "--columns"),
        metrics=tuple(map(known_metric, names_in(asked.metric))),
        cells=asked.cells,
    )
    if view.cells and view.is_pivot:
        raise QueryError("--cells is a line a cell; --rows, --columns and --metric are a pivot: ask for one")
    written_as = asked.format or format_of(asked.output, _SUFFIXES)
    sweeps = read_sweeps(asked.sweeps)
    if written_as == "table" and not asked.output:
        put_out(rendered(content(sweeps, view), sys.stdout), None)
    else:
        put_out(_FORMATS[written_as](sweeps, view), asked.output)
    if not asked.format and not asked.output:
        _write_beside(asked.sweeps, sweeps)
    if written_as in _ROWS_ALONE:
        sys.stderr.writelines(f"dcpbench.report: {sentence}\n" for sentence in first_of(sweeps.left_out))
    return 0


def _parser() -> argparse.ArgumentParser:
    show = argparse.ArgumentParser(
        prog="python -m dcpbench.report", epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = show.add_argument
    add("sweeps", type=Path, nargs="+", metavar="sweep", help="folder of a sweep, or of several")
    add(
        "--where",
        action="append",
        default=[],
        metavar="COND",
        help="only such rows: status!=pass, save_s>=0.1, model=null, reason~Error (several: all must hold)",
    )
    add("--rows", action="append", default=[], metavar="AXIS,...", help="what a pivot has down its side")
    add("--columns", action="append", default=[], metavar="AXIS,...", help="what it has along its top")
    add(
        "--metric",
        action="append",
        default=[],
        metavar="NAME,...",
        help="a pivot of medians of save_stall_s, load_s, checkpoint_bytes, ...",
    )
    add("--cells", action="store_true", help="a line a cell, however many there are")
    add("--format", choices=list(_FORMATS), help="csv and json: the rows, without details")
    add_output(show)
    return show


def _names(asked: list[str], option: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(known_column(name, option) for name in names_in(asked)))


def _write_beside(places: list[Path], sweeps: Sweeps) -> None:
    if len(places) != 1 or not (places[0] / RESULTS_JSONL).exists():
        return
    try:
        write_reports(places[0], sweeps)
    except OSError as error:
        told = f"report.html and junit.xml are as they were: {error.filename}: {error.strerror}"
        sys.stderr.write(f"dcpbench.report: {told}\n")


def _table(sweeps: Sweeps, view: View) -> str:
    return rendered(content(sweeps, view), io.StringIO())


def _markdown(sweeps: Sweeps, view: View) -> str:
    return markdown(content(sweeps, view))


def _csv(sweeps: Sweeps, view: View) -> str:
    return str(shown(sweeps, view.where).frame.drop(columns="details").to_csv(index=False))


def _json(sweeps: Sweeps, view: View) -> str:
    rows = records(shown(sweeps, view.where).frame.drop(columns="details"))
    return json.dumps(rows, indent=1, allow_nan=False) + "\n"


def _html(sweeps: Sweeps, view: View) -> str:
    chosen = shown(sweeps, view.where)
    return page(chosen, ", ".join(chosen.environments))


def _junit(sweeps: Sweeps, view: View) -> str:
    return junit(shown(sweeps, view.where))


_FORMATS: dict[str, Callable[[Sweeps, View], str]] = {
    "table": _table,
    "markdown": _markdown,
    "csv": _csv,
    "json": _json,
    "html": _html,
    "junit": _junit,
}
