"""`python -m dcpbench.report <sweep>...`: the tables again, from the rows, on whatever they are wanted."""

import argparse
import io
import json
import sys
from pathlib import Path

from dcpbench.analysis.frame import Sweeps, read_sweeps, records
from dcpbench.analysis.query import QueryError, known_column, known_metric, names_in, parse
from dcpbench.records.row import NESTED
from dcpbench.records.store import RESULTS_JSONL
from dcpbench.report.document import first_of
from dcpbench.report.files import add_output, format_of, put_out, write_reports
from dcpbench.report.junit import junit
from dcpbench.report.markdown import markdown
from dcpbench.report.page import page
from dcpbench.report.show_document import MOST_CELLS, View, content, shown
from dcpbench.report.terminal import rendered

_FORMATS = {
    ".txt": "table",
    ".md": "markdown",
    ".csv": "csv",
    ".json": "json",
    ".html": "html",
    ".xml": "junit",
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
    written_as = format_of(asked, _FORMATS)
    sweeps = read_sweeps(asked.sweeps)
    put_out(_text(sweeps, view, written_as, bool(asked.output)), asked.output)
    if not asked.format and not asked.output:
        _write_beside(asked.sweeps, sweeps)
    if written_as in _ROWS_ALONE:
        sys.stderr.writelines(f"dcpbench.report: {sentence}\n" for sentence in first_of(sweeps.left_out))
    return 0


def _parser() -> argparse.ArgumentParser:
    show = argparse.ArgumentParser(
        prog="python -m dcpbench.report", epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    show.add_argument(
        "sweeps", type=Path, nargs="+", metavar="sweep", help="folder of a sweep, or of several"
    )
    for option, metavar, text in (
        (
            "where",
            "COND",
            "only such rows: status!=pass, save_s>=0.1, model=null, reason~Error (several: all must hold)",
        ),
        ("rows", "AXIS,...", "what a pivot has down its side"),
        ("columns", "AXIS,...", "what it has along its top"),
        ("metric", "NAME,...", "a pivot of medians of save_stall_s, load_s, checkpoint_bytes, ..."),
    ):
        show.add_argument(f"--{option}", action="append", default=[], metavar=metavar, help=text)
    show.add_argument("--cells", action="store_true", help="a line a cell, however many there are")
    add_output(show, _FORMATS, "csv and json: the rows, without details")
    return show


def _names(asked: list[str], option: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(known_column(name, option) for name in names_in(asked)))


def _write_beside(places: list[Path], sweeps: Sweeps) -> None:
    if len(places) != 1 or not (places[0] / RESULTS_JSONL).exists():
        return
    try:
        write_reports(places[0], sweeps)
    except OSError as error:
        why = f"{error.filename}: {error.strerror}"
        sys.stderr.write(f"dcpbench.report: report.html and junit.xml are as they were: {why}\n")


def _text(sweeps: Sweeps, view: View, written_as: str, to_file: bool) -> str:
    if written_as == "table":
        return rendered(content(sweeps, view), io.StringIO() if to_file else sys.stdout)
    if written_as == "markdown":
        return markdown(content(sweeps, view))
    chosen = shown(sweeps, view.where)
    if written_as == "html":
        return page(chosen, ", ".join(chosen.environments))
    if written_as == "junit":
        return junit(chosen)
    rows = chosen.frame.drop(columns=[*NESTED])
    if written_as == "csv":
        return str(rows.to_csv(index=False))
    return json.dumps(records(rows), indent=1, allow_nan=False) + "\n"
