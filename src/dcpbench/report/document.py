"""A report as sections, failures and sentences, written for a terminal, as plain lines or as Markdown; the
texts of its values; and where it is written."""

import json
import math
import re
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, TextIO

import pandas as pd
from rich.console import Console
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from dcpbench.analysis.frame import as_text, plain_rows
from dcpbench.analysis.query import QueryError
from dcpbench.config.text import clipped, size_text, visible
from dcpbench.core.axes import AXES
from dcpbench.core.checks import CHECKS
from dcpbench.core.metrics import METRICS
from dcpbench.core.statuses import BAD
from dcpbench.records import files
from dcpbench.records.store import csv_entry
from dcpbench.report.styles import standard_output, style_of, text_of, without_trailing_blanks

_MOST_DAMAGED = 5
_FAILURES = ("status", "cell", "reason", "cause", "again", "more")
_SPECIAL = re.compile(r"([\\`*\[\]|<>&@#])")
_CHECKS, _OF_COSTS = "checks", ("rounds", "smallest\ndetectable")
_WIDTH_OF_A_FILE, _UNFOLDED = 120, 1000
_LONGEST_WORD = 24
"""A longer one is broken where a table does not fit."""
_FAILED, _TRAINING = "failed: ", "training failed: "


@dataclass(frozen=True)
class Table:
    """A table of text, or of `rich.text.Text`; newlines in the head of a column break it into lines.

    Args:
        statuses: the columns that contain statuses.
        numbers: columns that are aligned on the right, besides those of metrics.
        heading: a column that in the terminal is printed above the rows with the same value.
        below: a column that in the terminal is printed below these rows, after the value of the first column.
        folded: columns whose entries can be broken between words.
        left_out: columns for which a terminal is too narrow.
        indent: the blanks before each of its lines.
    """

    title: str
    table: pd.DataFrame
    statuses: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()
    heading: str = ""
    below: str = ""
    folded: tuple[str, ...] = ("overrides",)
    left_out: tuple[str, ...] = ()
    indent: int = 0


@dataclass(frozen=True)
class Lines:
    """Lines of text, or of `rich.text.Text`, below a title. `unbroken` lines, which are to be copied, are
    broken by a terminal alone."""

    title: str
    lines: Sequence[str | Text]
    unbroken: bool = False


@dataclass(frozen=True)
class Content:
    """Sections, then failures, then sentences.

    Args:
        failures: `status`, `cell`, `reason`, `more`, and `cause` (one a line) and `again`, which can be
            empty; `runs` is optional.
        more: how many failures are not listed, and where to find them.
        damaged: what could not be read.
        headline: how many cells ended with which result.
    """

    sections: Sequence[Table | Lines] = ()
    failures: pd.DataFrame = field(default_factory=lambda: pd.DataFrame(columns=_FAILURES))
    more: str = ""
    damaged: Sequence[str] = ()
    headline: str = ""


def first_sentences(sentences: Sequence[str]) -> list[str]:
    """Return the first sentences about damaged lines, and how many more there are."""
    if len(sentences) <= _MOST_DAMAGED + 1:
        return list(sentences)
    return [*sentences[:_MOST_DAMAGED], f"and {len(sentences) - _MOST_DAMAGED} more damaged lines"]


def document_text(contents: Iterable[Content], written_as: str, file: TextIO) -> str:
    """Return a document as Markdown, or as the terminal or file shows it."""
    written = (
        markdown(content) if written_as == "markdown" else render(content, file) for content in contents
    )
    return "\n".join(written).rstrip("\n") + "\n"


def width_of(file: TextIO) -> int:
    """Return the width of a terminal, or that of a page for a file."""
    console = Console(file=file)
    return console.width if console.is_terminal else _WIDTH_OF_A_FILE


def render(content: Content, file: TextIO) -> str:
    """Return a report for this file: with styles for a terminal, whose tables fit its width."""
    console = Console(file=file)
    width = console.width if console.is_terminal else None
    sections = [
        _fitted(shown, width) if width and isinstance(shown, Table) else shown for shown in content.sections
    ]
    widths = [_widths(shown).maximum + shown.indent for shown in sections if isinstance(shown, Table)]
    console.width = max([console.width, *widths])
    console.begin_capture()

    def line(text: Text, wrapped: int | None = width, indent: int = 0) -> None:
        if wrapped:
            console.print(Padding(text, (0, 0, 0, indent)), width=wrapped)
        else:
            console.print(Text(" " * indent).append_text(text), soft_wrap=True)

    for shown, following in zip_longest(sections, sections[1:]):
        if shown.title:
            line(text_of(shown.title, "bold"))
        if isinstance(shown, Table):
            _print_table(console, shown, width, line)
        else:
            for text in shown.lines:
                of = text if isinstance(text, Text) else text_of(text)
                line(of, None if shown.unbroken else width, 2 if shown.title else 0)
            if shown.title or not isinstance(following, Table) or following.title:
                console.print()
    for failed in content.failures.to_dict("records"):
        reason = clipped(failed["reason"])
        failure = text_of(f"{failed['status']} ", style_of(failed["status"]))
        line(failure.append(visible(f"{failed['cell']}{_counted(failed)}: {reason}"), style="default"))
        for cause in failed["cause"].splitlines():
            line(text_of(cause), indent=4)
        if failed["again"]:  # one line, to be copied as it is
            line(text_of(f"    again: {failed['again']}", "dim"), None)
    for sentence in content.damaged:
        line(text_of(sentence, BAD))
    for sentence in filter(None, [content.more, content.headline]):
        line(Text(visible(sentence, but="\n")))
    return without_trailing_blanks(console.end_capture())


def _print_table(console: Console, shown: Table, width: int | None, line: Callable[[Text], None]) -> None:
    """Print a table and what is left out of it. One whose words can be broken fits a terminal's width."""
    fits = width and any(name in shown.table for name in (_CHECKS, *shown.folded))
    for heading, table, below in _parts(shown):
        if heading:
            line(text_of(heading, "bold"))
        least = _widths(shown).minimum + shown.indent
        console.print(Padding(table, (0, 0, 0, shown.indent)), width=max(width or 0, least) if fits else None)
        for text in below:
            line(text)
        if shown.left_out:
            left_out = ", ".join(shown.left_out).replace("\n", " ")
            line(text_of(f"not shown, for lack of columns in this terminal: {left_out}", "dim"))
        console.print()


def _widths(shown: Table) -> Measurement:
    """Return the width of a table with only long words broken, and that with no line broken."""
    wide = Console(width=_UNFOLDED)
    parts = [Measurement.get(wide, wide.options, table) for _, table, _ in _parts(shown)]
    least, most = (max(widths) for widths in zip(*parts, strict=True))
    folded = [name for name in shown.folded if name in shown.table]
    longest = [max(_width(value, of_words=True) for value in shown.table[name]) for name in folded]
    return Measurement(least - sum(max(0, width - _LONGEST_WORD) for width in longest), most)


def _fitted(shown: Table, width: int) -> Table:
    """Break the checks of a table into lines if it does not fit, then leave the last metrics out; if there
    are none left, break the checks between words too. Of compared costs, leave out what the verdict says.
    Axes that then do not fit are one column."""
    if _widths(shown).maximum <= width:
        return shown
    optional = [name for name in _OF_COSTS if name in shown.table]
    if _CHECKS in shown.table:
        table = shown.table.assign(**{_CHECKS: shown.table[_CHECKS].str.replace("; ", ";\n")})
        shown, optional = replace(shown, table=table), [name for name in table.columns if name in METRICS]
    while optional and _widths(shown).minimum > width:
        left_out = (optional.pop(), *shown.left_out)
        shown = replace(shown, table=shown.table.drop(columns=left_out[0]), left_out=left_out)
    if _widths(shown).minimum <= width:
        return shown
    shown = replace(shown, folded=(*shown.folded, _CHECKS))
    axes = [name for name in shown.table if name in AXES or name == "overrides"]
    if len(axes) < 2 or _widths(shown).minimum <= width:
        return shown
    keys = ["" if name == "overrides" else f"{name}=" for name in axes]
    cells = [
        " ".join(f"{key}{value}" for key, value in zip(keys, values, strict=True) if value != "-")
        for values in shown.table[axes].astype(str).to_numpy()
    ]
    table = shown.table.drop(columns=axes)
    table.insert([*shown.table].index(axes[0]), "cell", cells)
    return replace(shown, table=table, folded=(*shown.folded, "cell"))


def _counted(failed: dict[Hashable, str]) -> str:
    counts = ", ".join(filter(None, [failed.get("runs", ""), failed["more"]]))
    return f" ({counts})" if counts else ""


def _parts(shown: Table) -> Iterator[tuple[str, RichTable, list[Text]]]:
    """Yield a table, or one for each heading in it: the heading, the rows, and the texts below them."""
    if not shown.heading:
        yield "", _table(shown, shown.table), []
        return
    inside = shown.table.drop(columns=[shown.heading, shown.below], errors="ignore")
    widths = [int(inside[name].map(_width).max()) for name in inside]
    for heading, rows in shown.table.groupby(shown.heading, sort=False):
        part = inside.loc[rows.index]
        texts = rows[shown.below] if shown.below else ()
        below = [f"{name}: {text}" for name, text in zip(part.iloc[:, 0], texts, strict=False) if text]
        yield str(heading), _table(shown, part, widths), [text_of(line) for line in below]


def _table(shown: Table, rows: pd.DataFrame, widths: Sequence[int] = ()) -> RichTable:
    """Return these rows as a table; with widths, which several tables share, it has no head."""
    heads = [str(column) for column in rows.columns]
    table = RichTable(box=None, pad_edge=bool(widths), header_style="bold", show_header=not widths)
    for number, (head, width) in enumerate(zip_longest(heads, widths)):
        unbroken = bool(widths) or head not in shown.folded
        least = width or max(_width(value, not unbroken) for value in (head, *rows.iloc[:, number]))
        least = least if unbroken else min(least, _LONGEST_WORD)
        title = Text(visible(head, but="\n"))
        justify: Any = "right" if head in METRICS or head in shown.numbers else "left"
        table.add_column(title, justify=justify, min_width=least, no_wrap=unbroken, overflow="fold")
    for values in rows.to_dict("records"):
        known = any(str(values[head]) == "xfail" for head in shown.statuses)
        table.add_row(*(_entry(value, head in shown.statuses, known) for head, value in values.items()))
    return table


def _width(value: Any, of_words: bool = False) -> int:
    """Return the length of the longest line of a value, or of its longest word."""
    text = value.plain if isinstance(value, Text) else str(value)
    return max(map(len, text.split() if of_words else text.splitlines()), default=0)


def _entry(value: Any, is_status: bool, is_known: bool) -> Text:
    """Return a styled entry. The first status, the worst, gives the style; known failures are not red."""
    if isinstance(value, Text):
        return value
    text = visible(str(value), but="\n")
    if is_status and text:
        return Text(text, style=style_of(text.split(", ")[0].lstrip("0123456789 ")))
    if names_failed_checks(text):
        return Text(text, style=style_of("xfail") if is_known else BAD)
    return Text(text, style=BAD if text == "NO" else "")


def markdown(content: Content) -> str:
    """Return a report as Markdown; texts of rows are escaped in tables, and code elsewhere."""
    parts = []
    for shown in content.sections:
        parts += [f"**{_escaped(shown.title)}**"] if shown.title else []
        if isinstance(shown, Table):
            parts.append(_markdown_table(shown))
        else:
            written = _code if shown.unbroken else _escaped
            parts.append("\n".join(f"- {written(str(text))}" for text in shown.lines))
    if len(content.failures):
        parts.append("\n".join(map(_markdown_failure, content.failures.to_dict("records"))))
    texts = ([_escaped(line) for line in text.splitlines()] for text in (content.more, content.headline))
    more, headline = map("\n".join, texts)
    parts += filter(None, [more, *map(_code, content.damaged), headline])
    return "\n\n".join(parts) + "\n"


def _markdown_table(shown: Table) -> str:
    table = shown.table
    if shown.heading:
        once = table[shown.heading].mask(table[shown.heading].duplicated(), "")
        table = table.assign(**{shown.heading: once})
    heads = [_escaped(str(column)) for column in table.columns]
    rules = ["---:" if column in (*METRICS, *shown.numbers) else "---" for column in table.columns]
    lines = [[_markdown_entry(value) for value in line] for line in table.to_numpy().tolist()]
    return "\n".join(f"| {' | '.join(line)} |" for line in [heads, rules, *lines])


def _markdown_entry(value: Any) -> str:
    if isinstance(value, Text):  # one character per sweep; the lines below only point to them
        return f"`{value.plain.splitlines()[0].replace(' ', '·')}`"
    return _escaped(str(value))


def _markdown_failure(failed: dict[Hashable, str]) -> str:
    named = [f"**{_escaped(failed['status'])}**", _code(failed["cell"]), _escaped(_counted(failed))]
    line = f"- {' '.join(filter(None, named))}"
    line += f": {_code(clipped(failed['reason']))}" if failed["reason"] else ""
    line += "".join(f"<br>{_escaped(cause)}" for cause in failed["cause"].splitlines())
    return f"{line}<br>again: {_code(failed['again'])}" if failed["again"] else line


def _escaped(text: str) -> str:
    return _SPECIAL.sub(r"\\\1", visible(" ".join(text.split())))


def _code(text: str) -> str:
    """Return a code span, with a fence longer than any in the text."""
    flat = visible(" ".join(text.split()))
    fence = "`" * (max((len(run) for run in re.findall("`+", flat)), default=0) + 1)
    space = " " if len(fence) > 1 or flat[:1] == "`" else ""
    return f"{fence}{space}{flat}{space}{fence}"


def axis_text(value: object) -> str:
    """Return the value of an axis as text, at most 80 characters of it."""
    return clipped(as_text(value), 80)


def checks_text(checks: Mapping[str, bool | None]) -> str:
    """Name the first failed check of a cell and count the others, those of training separately; or count
    those that passed."""
    failed = [check for check, passed in checks.items() if passed is False]
    passed = sum(value is True for value in checks.values())
    if not failed:
        return f"{passed} passed" if passed else "-"
    training = [check for check in failed if CHECKS[check].training]
    resume = [check for check in failed if check not in training]
    of_kinds = ((_FAILED, resume), (_TRAINING, training))
    counts = {kind: f", +{len(names) - 1}" if len(names) > 1 else "" for kind, names in of_kinds}
    return "; ".join(f"{kind}{names[0]}{counts[kind]}" for kind, names in of_kinds if names)


def names_failed_checks(text: str) -> bool:
    """Tell whether `checks_text` names failed checks."""
    return text.startswith((_FAILED, _TRAINING))


def quantity_text(metric: str, value: float) -> str:
    """Return a value of a metric with its unit; `-` if it was not measured."""
    unit = METRICS[metric].unit if metric in METRICS else ""
    if pd.isna(value):
        return "-"
    if unit == "s":
        return f"{value:#.3g} s" if value < 1 else f"{value:.3f} s"
    if unit == "bytes":
        return size_text(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def column_entry(metric: str, value: Any) -> str:
    """Return a value of a metric for a separate column: seconds without their unit, others with it."""
    if METRICS[metric].unit != "s":
        return quantity_text(metric, value)
    return "-" if pd.isna(value) else f"{value:.3f}"


def change_style(metric: str, ratio: float) -> str:
    """Return the style of a change: red if it is worse, green if it is better, none if it is neither."""
    better = METRICS[metric].better if metric in METRICS else "lower"
    if better is None or math.isnan(ratio):
        return ""
    return "red" if (ratio > 1) == (better == "lower") else "green"


def format_of(format: str | None, output: Path | None, formats: Mapping[str, str]) -> str:
    """Return the requested format, or the one of the file's suffix; raise QueryError if there is none."""
    if format or output is None:
        return format or "table"
    if output.suffix in formats:
        return formats[output.suffix]
    *names, last = formats
    endings = f"{', '.join(names)} or {last}"
    raise QueryError(f"-o {output}: cannot infer the format; pass --format, or end the name in {endings}")


def rows_text(table: pd.DataFrame, written_as: str) -> str:
    """Return the rows of a table as JSON or CSV; CSV quotes formulas."""
    if written_as == "csv":
        table = table.copy()
        for name in table.select_dtypes(["string", "object"]):
            entries = [csv_entry(value) for value in table[name]]
            table[name] = pd.Series(entries, table.index, dtype=object)
        return str(table.to_csv(index=False))
    return json.dumps(plain_rows(table), indent=1, allow_nan=False) + "\n"


def write_output(text: str, output: Path | None) -> None:
    """Write to a file, atomically, or to standard output; raise ResultsError if that fails."""
    if output is None:
        encoding = sys.stdout.encoding or "utf-8"
        with standard_output():
            sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
            sys.stdout.flush()
        return
    try:
        if output.exists() and not output.is_file():  # a pipe
            output.write_text(text, encoding="utf-8")
        else:
            files.replace(output, [text.encode()])
    except OSError as error:
        raise QueryError(f"-o {output}: cannot be written: {error.strerror}") from None
