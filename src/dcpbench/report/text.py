"""The results table in the terminal."""

from pathlib import Path

import pandas as pd
from rich.table import Table
from rich.text import Text

from dcpbench.report.frame import failures, headline, read_frame, tables
from dcpbench.report.styles import BAD, console_for, style_of


def print_report(folder: Path) -> None:
    """Print a sweep's table and what did not pass, from its rows, to standard output.

    Raises:
        dcpbench.results.ResultsError: the folder holds no results.
    """
    frame, left_out = read_frame(folder)
    printed = [_table(shown) for shown in tables(frame)]
    console = console_for(*printed)
    for table in printed:
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
    console.print(Text(headline(frame)), soft_wrap=True)


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
