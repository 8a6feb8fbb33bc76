"""A report as GitHub's Markdown, for a pull request or the summary of a CI job."""

import re
from collections.abc import Hashable
from typing import Any

from rich.text import Text

from dcpbench.report.document import Content, Table
from dcpbench.report.labels import clipped, is_metric

_SPECIAL = re.compile(r"([\\`*\[\]|<>&@#])")
_REASON = 500


def markdown(content: Content) -> str:
    """The same as in the terminal. What rows say stays text: escaped in tables, elsewhere code."""
    parts = []
    for shown in content.tables:
        if shown.title:
            parts.append(f"**{_escaped(shown.title)}**")
        parts.append(_table(shown))
    if len(content.failures):
        parts.append("\n".join(map(_failure, content.failures.to_dict("records"))))
    parts += [content.more] if content.more else []
    parts += [_code(sentence) for sentence in content.damaged]
    parts += ["\n".join(map(_escaped, content.headline.splitlines()))] if content.headline else []
    return "\n\n".join(parts) + "\n"


def _table(shown: Table) -> str:
    table = shown.table
    if shown.heading:
        table = table.assign(
            **{shown.heading: table[shown.heading].mask(table[shown.heading].duplicated(), "")}
        )
    heads = [_escaped(str(column)) for column in table.columns]
    rules = ["---:" if is_metric(str(column)) else "---" for column in table.columns]
    lines = [heads, rules, *([_entry(value) for value in line] for line in table.to_numpy().tolist())]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _entry(value: Any) -> str:
    if isinstance(value, Text):  # signs of one width, of which the first line is what others point to
        return f"`{value.plain.splitlines()[0].replace(' ', '·')}`"
    return _escaped(str(value))


def _failure(item: dict[Hashable, str]) -> str:
    beside = ", ".join(filter(None, [item.get("runs", ""), item["more"]]))
    line = f"- **{item['status']}** {_code(item['cell'])}{f' ({beside})' if beside else ''}"
    line += f": {_code(clipped(item['reason'], _REASON))}" if item["reason"] else ""
    return f"{line}<br>again: {_code(item['again'])}" if item["again"] else line


def _escaped(text: str) -> str:
    return _SPECIAL.sub(r"\\\1", " ".join(text.split()))


def _code(text: str) -> str:
    """A code span, whose fence is longer than any in the text."""
    flat = " ".join(text.split())
    fence = "`" * (max((len(run) for run in re.findall("`+", flat)), default=0) + 1)
    space = " " if len(fence) > 1 or flat[:1] == "`" else ""
    return f"{fence}{space}{flat}{space}{fence}"
