"""`python -m dcpbench.report history <folder>...`: its command line."""

import argparse
import io
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd

from dcpbench.analysis.cell_history import stories
from dcpbench.analysis.cell_matrix import history
from dcpbench.analysis.change_points import FALSE_ALARMS, LEAST_EFFECT
from dcpbench.analysis.history_rows import Rows, read_history
from dcpbench.analysis.query import COLUMNS, Condition, QueryError, known_metric, names_in, parse, select
from dcpbench.report.document import first_of
from dcpbench.report.history_export import as_json, markdown
from dcpbench.report.history_terminal import rendered
from dcpbench.report.output import add_output, format_of, put_out

METRICS = ("save_stall_s", "save_s", "load_s")

_SUFFIXES = {".txt": "table", ".md": "markdown", ".json": "json"}

_EPILOG = f"""\
Cells are matched by their axes and other overrides; of runs of one cell (repeats=N) it is the worst
status and the median cost. A change of a cost is told where a test finds one, of {LEAST_EFFECT:.0%} at least;
in at most {FALSE_ALARMS:.0%} of histories there is one that is none: docs/history.md.
"""


def main(arguments: list[str]) -> int:
    """Show how cells went over many sweeps.

    Raises:
        ResultsError: one of the folders holds no results, or what was asked makes no sense.
    """
    asked = _parser().parse_args(arguments)
    conditions = [parse(condition) for condition in asked.where]
    metrics = tuple(dict.fromkeys(map(known_metric, names_in(asked.metric)))) or METRICS
    written_as = asked.format or format_of(asked.output, _SUFFIXES)
    rows = read_history(
        asked.folders, [*metrics, *(one.column for one in conditions if one.column != "sweep")]
    )
    text = _text(_chosen(rows, conditions), metrics, written_as, asked)
    put_out(text, asked.output)
    return 0


def _parser() -> argparse.ArgumentParser:
    show = argparse.ArgumentParser(
        prog="python -m dcpbench.report history",
        description="How the status and the costs of each cell went over the sweeps of a folder.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = show.add_argument
    add("folders", type=Path, nargs="+", metavar="folder", help="folder of sweeps, as outputs/nightly")
    add(
        "--where",
        action="append",
        default=[],
        metavar="COND",
        help="only such rows: parallel=fsdp2, sweep~2026-11 (several: all must hold)",
    )
    add(
        "--metric",
        action="append",
        default=[],
        metavar="NAME,...",
        help=f"which costs, instead of {', '.join(METRICS)}",
    )
    add("--last", type=_count, metavar="N", help="the newest N sweeps alone")
    add("--all", action="store_true", help="also the cells that are well and in which nothing changed")
    add("--format", choices=list(dict.fromkeys(_SUFFIXES.values())), help="json: always all cells")
    add_output(show)
    return show


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number, 1 or more")
    return int(text)


def _chosen(rows: Rows, conditions: Sequence[Condition]) -> Rows:
    """The rows that are meant.

    Raises:
        QueryError: there is none.
    """
    if not conditions:
        return rows
    asked = {"sweep": rows.frame["at"].map(dict(enumerate(rows.names)))} | {
        one.column: rows.frame[one.column] for one in conditions if one.column != "sweep"
    }
    typed = pd.DataFrame(asked).astype({name: COLUMNS[name] for name in asked})
    kept = select(typed.assign(row=range(len(typed))), conditions)["row"]
    if kept.empty:
        raise QueryError(f"no row of {len(rows.frame):,} in {len(rows.folders):,} sweeps meets every --where")
    return replace(rows, frame=rows.frame.iloc[kept].reset_index(drop=True))


def _text(rows: Rows, metrics: Sequence[str], written_as: str, asked: argparse.Namespace) -> str:
    told = history(rows, metrics, asked.last)
    cells = stories(told)
    remarks = first_of(rows.remarks)
    if written_as == "json":
        return as_json(told, cells, rows.remarks)
    if written_as == "markdown":
        return markdown(told, cells, remarks, asked.all)
    return rendered(told, cells, remarks, asked.all, io.StringIO() if asked.output else sys.stdout)
