"""A report in the terminal or as lines of text, and as GitHub's Markdown."""

import io
import re
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any, Literal, TextIO

import pandas as pd
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from dcpbench.config.text import visible
from dcpbench.core.statuses import BAD
from dcpbench.report.document import Content, Table
from dcpbench.report.labels import clipped, has_failed, is_metric, narrowed
from dcpbench.report.styles import console_for, style_of, text_of, without_trailing_blanks

_SPECIAL = re.compile(r"([\\`*\[\]|<>&@#])")
_REASON = 300
_CHECKS = "checks"
_WIDTH_OF_A_FILE = 120


def width_of(file: TextIO) -> int:
    """How many signs a line may have that is not to be broken: the terminal's width, or that of a page."""
    console = Console(file=file)
    return console.width if console.is_terminal else _WIDTH_OF_A_FILE


def rendered(content: Content, file: TextIO) -> str:
    """A report for this file: with styles for a terminal, and where that is narrow with short tables."""
    own = Console(file=file)
    if own.is_terminal:
        content = replace(content, tables=[_fitted(shown, own.width) for shown in content.tables])
    page = io.StringIO()
    console = Console(
        file=page,
        width=max([own.width, *map(_needed, content.tables)]),
        force_terminal=own.is_terminal,
        color_system=own.color_system,  # type: ignore[arg-type]
    )
    _print(console, content, own.width if own.is_terminal else None)
    return without_trailing_blanks(page.getvalue())


def _needed(shown: Table) -> int:
    """How many signs the lines of a table have that are not broken."""
    return console_for(*(table for _, table, _ in _parts(shown))).width


def _fitted(shown: Table, width: int) -> Table:
    """A table whose lines are not longer than that, as far as that can be: with short names, and of a table
    with checks, which say more, without the metrics that have no room."""
    if _needed(shown) > width:
        shown = replace(shown, table=narrowed(shown.table))
    metrics = [name for name in shown.table.columns if is_metric(str(name))] if _CHECKS in shown.table else []
    while metrics and _needed(shown) > width:
        shown = replace(shown, table=shown.table.drop(columns=metrics.pop()))
    return shown


def _print(console: Console, content: Content, wrapped: int | None) -> None:
    for shown in content.tables:
        if shown.title:
            _print_line(console, text_of(shown.title, "bold"), wrapped)
        for heading, table, below in _parts(shown):
            if heading:
                _print_line(console, text_of(heading, "bold"), wrapped)
            console.print(table, width=wrapped if _CHECKS in shown.table else None)
            for line in below:
                _print_line(console, line, wrapped)
            console.print()
    for item in content.failures.to_dict("records"):
        _print_line(console, _failure(item), wrapped)
        if item["again"]:  # one line, to be copied as it is
            _print_line(console, text_of(f"    again: {item['again']}", "dim"))
    for sentence in content.damaged:
        _print_line(console, text_of(sentence, BAD), wrapped)
    for sentence in filter(None, [content.more, content.headline]):
        _print_line(console, Text(visible(sentence, but="\n")), wrapped)


def _print_line(console: Console, line: Text, wrapped: int | None = None) -> None:
    console.print(line, soft_wrap=wrapped is None, width=wrapped)


def _failure(item: dict[Hashable, str]) -> Text:
    line = text_of(f"{item['status']} ", style_of(item["status"]))
    reason = clipped(item["reason"], _REASON)
    return line.append(visible(f"{item['cell']}{_beside(item)}: {reason}"), style="default")


def _beside(item: dict[Hashable, str]) -> str:
    beside = ", ".join(filter(None, [item.get("runs", ""), item["more"]]))
    return f" ({beside})" if beside else ""


def _parts(shown: Table) -> Iterator[tuple[str, RichTable, list[Text]]]:
    """A table, or one for each heading in it: the heading, the rows, and what stands below them."""
    if not shown.heading:
        yield "", _table(shown, shown.table), []
        return
    inside = shown.table.drop(columns=[shown.heading, shown.below], errors="ignore")
    widths = [int(inside[name].map(_width).max()) for name in inside]
    for heading, rows in shown.table.groupby(shown.heading, sort=False):
        own = inside.loc[rows.index]
        texts = rows[shown.below] if shown.below else ()
        below = [f"{name}: {text}" for name, text in zip(own.iloc[:, 0], texts, strict=False) if text]
        yield str(heading), _table(shown, own, widths), [text_of(line) for line in below]


def _table(shown: Table, rows: pd.DataFrame, widths: Sequence[int] = ()) -> RichTable:
    """These rows as a table; with widths, which several tables share, they have no head."""
    heads = [str(column) for column in rows.columns]
    table = RichTable(box=None, pad_edge=bool(widths), header_style="bold", show_header=not widths)
    for head, width in zip_longest(heads, widths):
        side: Literal["left", "right"] = "right" if is_metric(head) else "left"
        whole = bool(widths) or side == "right" or head in (*shown.statuses, _CHECKS)
        title = Text(visible(head, but="\n"))
        table.add_column(title, justify=side, min_width=width, no_wrap=whole, overflow="fold")
    for values in rows.to_dict("records"):
        known = any(str(values[head]) == "xfail" for head in shown.statuses)
        table.add_row(*(_entry(value, head in shown.statuses, known) for head, value in values.items()))
    return table


def _width(value: Any) -> int:
    return max(map(len, (value.plain if isinstance(value, Text) else str(value)).splitlines()), default=0)


def _entry(value: Any, is_status: bool, is_known: bool) -> Text:
    """An entry; of several statuses the worst stands first, after how many there are of it. What did not hold
    in a known failure is not red."""
    if isinstance(value, Text):
        return value
    text = visible(str(value))
    if is_status and text:
        return Text(text, style=style_of(text.split(", ")[0].lstrip("0123456789 ")))
    if has_failed(text):
        return Text(text, style=style_of("xfail") if is_known else BAD)
    return Text(text, style=BAD if text == "NO" else "")


def markdown(content: Content) -> str:
    """The same as in the terminal. What rows say stays text: escaped in tables, elsewhere code."""
    parts = []
    for shown in content.tables:
        if shown.title:
            parts.append(f"**{_escaped(shown.title)}**")
        parts.append(_markdown_table(shown))
    if len(content.failures):
        parts.append("\n".join(map(_markdown_failure, content.failures.to_dict("records"))))
    parts += [content.more] if content.more else []
    parts += [_code(sentence) for sentence in content.damaged]
    parts += ["\n".join(map(_escaped, content.headline.splitlines()))] if content.headline else []
    return "\n\n".join(parts) + "\n"


def _markdown_table(shown: Table) -> str:
    table = shown.table
    if shown.heading:
        table = table.assign(
            **{shown.heading: table[shown.heading].mask(table[shown.heading].duplicated(), "")}
        )
    heads = [_escaped(str(column)) for column in table.columns]
    rules = ["---:" if is_metric(str(column)) else "---" for column in table.columns]
    lines = [
        heads,
        rules,
        *([_markdown_entry(value) for value in line] for line in table.to_numpy().tolist()),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _markdown_entry(value: Any) -> str:
    if isinstance(value, Text):  # signs of one width, of which the first line is what others point to
        return f"`{value.plain.splitlines()[0].replace(' ', '·')}`"
    return _escaped(str(value))


def _markdown_failure(item: dict[Hashable, str]) -> str:
    line = f"- **{_escaped(item['status'])}** {_code(item['cell'])}{_escaped(_beside(item))}"
    line += f": {_code(clipped(item['reason'], _REASON))}" if item["reason"] else ""
    return f"{line}<br>again: {_code(item['again'])}" if item["again"] else line


def _escaped(text: str) -> str:
    return _SPECIAL.sub(r"\\\1", visible(" ".join(text.split())))


def _code(text: str) -> str:
    """A code span, whose fence is longer than any in the text."""
    flat = visible(" ".join(text.split()))
    fence = "`" * (max((len(run) for run in re.findall("`+", flat)), default=0) + 1)
    space = " " if len(fence) > 1 or flat[:1] == "`" else ""
    return f"{fence}{space}{flat}{space}{fence}"
