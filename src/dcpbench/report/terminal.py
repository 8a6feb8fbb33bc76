"""A report in the terminal, or as lines of text."""

import io
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from dcpbench.analysis.frame import read_sweeps
from dcpbench.report.document import Content, content
from dcpbench.report.labels import clipped, narrowed
from dcpbench.report.pivot import Table
from dcpbench.report.styles import BAD, console_for, style_of

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_REASON = 2_000
_KNOWN_REASON = 300


def print_report(folder: Path) -> None:
    """Print a sweep's table and what did not pass, from its rows, to standard output.

    Raises:
        dcpbench.records.store.ResultsError: the folder holds no results.
    """
    print_text(rendered(content(read_sweeps([folder])), sys.stdout))


def print_text(text: str) -> None:
    """Write to standard output in one go, whatever its encoding has no sign for as a question mark."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()


def rendered(said: Content, file: TextIO) -> str:
    """A report as it is to be written to this file: with styles for a terminal, and if that is too narrow for
    a line a cell, with all checks in one column."""
    tables = [_table(shown) for shown in said.tables]
    own = Console(file=file)
    width = console_for(*tables, file=file).width
    if own.is_terminal and width > own.width:
        tables = [_table(replace(shown, table=narrowed(shown.table))) for shown in said.tables]
        width = console_for(*tables, file=file).width
    page = io.StringIO()
    console = Console(
        file=page,
        width=width,
        force_terminal=own.is_terminal,
        color_system=own.color_system,  # type: ignore[arg-type]
    )
    _say_all(console, said, tables, own.width if own.is_terminal else None)
    return page.getvalue()


def _say_all(console: Console, said: Content, tables: list[RichTable], wrapped: int | None) -> None:
    for shown, table in zip(said.tables, tables, strict=True):
        if shown.title:
            _say(console, Text(shown.title, style="bold"), wrapped)
        console.print(table)
        console.print()
    for item in said.failures.to_dict("records"):
        _say(console, _failure({str(name): str(value) for name, value in item.items()}), wrapped)
        if item["again"]:  # one line, to be copied as it is
            _say(console, Text(f"    again: {visible(item['again'])}", style="dim"))
    for sentence in said.damaged:
        _say(console, Text(visible(sentence), style=BAD), wrapped)
    for sentence in filter(None, [said.more, said.headline]):
        _say(console, Text(sentence), wrapped)


def visible(text: str) -> str:
    """A text without what a terminal would obey: control characters are written as escapes."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def _say(console: Console, line: Text, wrapped: int | None = None) -> None:
    console.print(line, soft_wrap=wrapped is None, width=wrapped)


def _failure(item: dict[str, str]) -> Text:
    line = Text(f"{visible(item['status'])} ", style=_style(item["status"]))
    beside = ", ".join(filter(None, [item.get("runs", ""), item["more"]]))
    named = f"{item['cell']} ({beside})" if beside else item["cell"]
    length = _REASON if item["again"] else _KNOWN_REASON
    line.append(f"{visible(named)}: {visible(clipped(item['reason'], length))}", style="default")
    return line


def _table(shown: Table) -> RichTable:
    heads = [str(column) for column in shown.table.columns]
    table = RichTable(box=None, pad_edge=False, header_style="bold")
    for head in heads:
        table.add_column(Text(visible(head)), justify="right" if head.endswith("_s") else "left")
    for values in shown.table.itertuples(index=False):
        entries = zip(heads, map(str, values), strict=True)
        table.add_row(*(_styled(visible(text), head in shown.statuses) for head, text in entries))
    return table


def _styled(text: str, is_status: bool) -> Text:
    """An entry; of several statuses the worst stands first, after how many there are of it."""
    if is_status and text:
        return Text(text, style=_style(text.split(", ")[0].lstrip("0123456789 ")))
    return Text(text, style=BAD if text == "NO" or text.endswith(" NO") else "")


def _style(status: str) -> str:
    if status == "seen":
        return style_of("pass")
    return BAD if status.endswith("(flaky)") else style_of(status)
