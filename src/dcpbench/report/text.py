"""The results table in the terminal."""

from pathlib import Path

import pandas as pd
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from dcpbench.report.frame import (
    counts,
    detection,
    failures,
    read_frame,
    summary,
    without_faults,
)
from dcpbench.report.styles import BAD, style_of

_UNFOLDED = 1000


def print_report(folder: Path) -> None:
    """Print a sweep's table and what did not pass, from its rows, to standard output.

    Raises:
        dcpbench.results.ResultsError: the folder holds no results.
    """
    frame, left_out = read_frame(folder)
    tables = [_table(shown) for shown in (summary(without_faults(frame)), detection(frame)) if len(shown)]
    # In a file, a pipe or a terminal too narrow for a row, rows are long lines and not folded columns.
    wide = Console(width=_UNFOLDED)
    needed = [Measurement.get(wide, wide.options, table).maximum for table in tables]
    console = Console(width=max(*needed, Console().width))
    for table in tables:
        console.print(table)
        console.print()
    for item in failures(frame).itertuples(index=False):
        line = Text(f"{item.status} ", style=style_of(str(item.status)))
        line.append(f"{item.cell}: {item.reason}", style="default")
        console.print(line, soft_wrap=True)
        if item.status not in ("skip", "xfail"):
            console.print(Text(f"    again: {item.again}", style="dim"), soft_wrap=True)
    for sentence in left_out:
        console.print(Text(sentence, style=BAD), soft_wrap=True)
    console.print(Text(f"{len(frame)} cells: {counts(frame)}"), soft_wrap=True)


def _table(shown: pd.DataFrame) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in shown.columns:
        table.add_column(column, justify="right" if column.endswith("_s") else "left")
    for values in shown.itertuples(index=False):
        table.add_row(*(_styled(str(column), value) for column, value in zip(shown, values, strict=True)))
    return table


def _styled(column: str, value: str) -> Text:
    if column == "status":
        return Text(value, style=BAD if value.endswith("(flaky)") else style_of(value))
    if value == "NO":
        return Text(value, style=BAD)
    return Text(value)
