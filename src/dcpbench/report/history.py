"""`python -m dcpbench.report history <folder>...`: how the cells of many sweeps went."""

import argparse
import io
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from dcpbench.analysis.cell_history import CellHistory, History, cell_histories, history
from dcpbench.analysis.change_points import FALSE_ALARMS, LEAST_EFFECT
from dcpbench.analysis.frame import records
from dcpbench.analysis.history_rows import Rows, read_history
from dcpbench.analysis.query import Condition, QueryError, known_metric, names_in, parse, queryable, select
from dcpbench.analysis.status_codes import KINDS
from dcpbench.records.metrics import METRICS
from dcpbench.report.document import first_of
from dcpbench.report.files import add_output, format_of, put_out
from dcpbench.report.history_document import MARKDOWN_STRIP, contents, strip_length
from dcpbench.report.markdown import markdown
from dcpbench.report.terminal import rendered, width_of

_FORMATS = {".txt": "table", ".md": "markdown", ".json": "json"}

_EPILOG = f"""\
Cells are matched by their axes, other overrides and configuration; of runs of one cell (repeats=N)
it is the worst status and the median cost. A change of a cost is shown where a test finds one, of
{LEAST_EFFECT:.0%} at least; in at most {FALSE_ALARMS:.0%} of histories there is one that is none:
docs/history.md.
"""


def main(arguments: list[str]) -> int:
    """Show how cells went over many sweeps.

    Raises:
        ResultsError: one of the folders holds no results, or what was asked makes no sense.
    """
    asked = _parser().parse_args(arguments)
    conditions = [parse(condition) for condition in asked.where]
    metrics = tuple(dict.fromkeys(map(known_metric, names_in(asked.metric)))) or default_metrics()
    written_as = format_of(asked, _FORMATS)
    columns = [one.column for one in conditions if one.column != "sweep"]
    rows = _chosen(read_history(asked.folders, [*metrics, *columns]), conditions)
    found = history(rows, metrics, asked.last)
    cells = cell_histories(found)
    if written_as == "json":
        text = _json(found, cells, rows.remarks)
    elif written_as == "markdown":
        strip = min(MARKDOWN_STRIP, len(found.sweeps))
        text = "\n".join(map(markdown, contents(found, cells, first_of(rows.remarks), asked.all, strip)))
    else:
        out = io.StringIO() if asked.output else sys.stdout
        strip = strip_length(found, cells, width_of(out))
        parts = contents(found, cells, first_of(rows.remarks), asked.all, strip)
        text = "\n".join(rendered(part, out) for part in parts)
    put_out(text, asked.output)
    return 0


def default_metrics() -> tuple[str, ...]:
    """The metrics that are shown without being asked for."""
    return tuple(spec.name for spec in METRICS.values() if spec.history)


def _parser() -> argparse.ArgumentParser:
    show = argparse.ArgumentParser(
        prog="python -m dcpbench.report history",
        description="How the status and the costs of each cell went over the sweeps of a folder.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    show.add_argument(
        "folders", type=Path, nargs="+", metavar="folder", help="folder of sweeps, as outputs/nightly"
    )
    for option, metavar, text in (
        ("where", "COND", "only such rows: parallel=fsdp2, sweep~2026-11 (several: all must hold)"),
        ("metric", "NAME,...", f"which costs, instead of {', '.join(default_metrics())}"),
    ):
        show.add_argument(f"--{option}", action="append", default=[], metavar=metavar, help=text)
    show.add_argument("--last", type=_count, metavar="N", help="the newest N sweeps alone")
    show.add_argument(
        "--all", action="store_true", help="also the cells that are ok and in which nothing changed"
    )
    add_output(show, _FORMATS, "json: always all cells")
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
    types = queryable()
    names = rows.frame["at"].map(dict(enumerate(rows.names)))
    asked = {one.column: names if one.column == "sweep" else rows.frame[one.column] for one in conditions}
    typed = pd.DataFrame(asked).astype({name: types[name] for name in asked})
    kept = select(typed.assign(row=range(len(typed))), conditions)["row"]
    if kept.empty:
        raise QueryError(f"no row of {len(rows.frame):,} in {len(rows.folders):,} sweeps meets every --where")
    return replace(rows, frame=rows.frame.iloc[kept].reset_index(drop=True))


def _json(found: History, cells: Sequence[CellHistory], remarks: Sequence[str]) -> str:
    """All sweeps and all cells, with every median and every change; sweeps are named by their place."""
    axes = records(found.cells)
    content = {
        "sweeps": records(found.sweeps),
        "cells": [_plain(cell, axes[cell.number]) for cell in cells],
        "statuses": {kind.letter: {"label": kind.label, "ok": kind.ok} for kind in KINDS},
        "remarks": list(remarks),
    }
    return json.dumps(content, allow_nan=False) + "\n"


def _plain(cell: CellHistory, axes: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": cell.name,
        "config_digest": axes.pop("config_digest"),
        "axes": axes,
        "statuses": "".join(KINDS[kind].letter for kind in cell.kinds),
        "ok": cell.now.ok,
        "last_seen": cell.last_seen,
        "since": cell.since,
        "reason": cell.reason or None,
        "reconfigured": cell.reconfigured and {"at": cell.first_seen, "keys": cell.reconfigured},
        "costs": {
            cost.metric: {
                "medians": [None if np.isnan(value) else float(value) for value in cost.medians],
                "changes": list(map(asdict, cost.changes)),
            }
            for cost in cell.costs
        },
    }
