"""A report as GitHub's Markdown, for a pull request or the summary of a CI job."""

import re
from collections.abc import Hashable

import pandas as pd

from dcpbench.report.document import Content
from dcpbench.report.labels import clipped

_SPECIAL = re.compile(r"([\\`*\[\]|<>&@#])")
_REASON = 500


def markdown(said: Content) -> str:
    """The same as in the terminal. What rows say stays text: escaped in tables, elsewhere code."""
    parts = []
    for shown in said.tables:
        if shown.title:
            parts.append(f"**{_escaped(shown.title)}**")
        parts.append(_table(shown.table))
    if len(said.failures):
        parts.append("\n".join(map(_failure, said.failures.to_dict("records"))))
    parts += [said.more] if said.more else []
    parts += [_code(sentence) for sentence in said.damaged]
    return "\n\n".join([*parts, said.headline]) + "\n"


def _table(table: pd.DataFrame) -> str:
    rules = ["---:" if str(column).endswith("_s") else "---" for column in table.columns]
    lines = [[str(column) for column in table.columns], rules, *table.astype(str).to_numpy().tolist()]
    return "\n".join(
        f"| {' | '.join(line if line is rule else map(_escaped, line))} |"
        for line, rule in zip(lines, [None, rules, *[None] * len(table)], strict=True)
    )


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
