"""What the commands of a report have in common: their options, and where their text goes."""

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TextIO

import pandas as pd

from dcpbench.analysis.frame import records
from dcpbench.analysis.query import QueryError
from dcpbench.config.text import visible
from dcpbench.records import files
from dcpbench.report.document import Content
from dcpbench.report.rendering import markdown, rendered
from dcpbench.report.styles import standard_output

_FORMULA = (*"=+-@", *"\uff1d\uff0b\uff0d\uff20")
"""What a formula begins with in a spreadsheet; the latter are as wide as a Chinese character."""


def format_of(asked: str | None, output: Path | None, formats: Mapping[str, str]) -> str:
    """The format that was asked for, or that the suffix stands for (else QueryError)."""
    if asked or output is None:
        return asked or "table"
    if output.suffix in formats:
        return formats[output.suffix]
    known = ", ".join(formats)
    raise QueryError(f"-o {output}: say with --format what to write; {known} speak for themselves")


def document_text(contents: Iterable[Content], written_as: str, file: TextIO) -> str:
    """A document as Markdown, or as a table in the way that this file takes it."""
    return "\n".join(
        markdown(content) if written_as == "markdown" else rendered(content, file) for content in contents
    )


def rows_text(table: pd.DataFrame, written_as: str, raw: bool) -> str:
    """The rows of a table as CSV or as JSON; in CSV a text that a spreadsheet would take for a formula gets
    an apostrophe before it, unless it is to be `raw`."""
    if written_as == "csv":
        table = table.copy()
        for name in table.select_dtypes(["string", "object"]):
            entries = [_csv_entry(value, raw) for value in table[name]]
            table[name] = pd.Series(entries, table.index, dtype=object)
        return str(table.to_csv(index=False))
    return json.dumps(records(table), indent=1, allow_nan=False) + "\n"


def _csv_entry(value: object, raw: bool) -> object:
    if not isinstance(value, str):
        return value
    shown = visible(value, but="\n\t")
    if raw or shown.lstrip()[:1] not in _FORMULA:
        return shown
    try:
        float(shown)
    except ValueError:
        return f"'{shown}"
    return shown


def put_out(text: str, output: Path | None) -> None:
    """Write to a file or to standard output, perhaps a closed pipe; ResultsError if that cannot be done."""
    if output is None:
        with standard_output():
            print_text(text)
        return
    try:
        _put_in_place(output, text)
    except OSError as error:
        raise QueryError(f"-o {output}: cannot be written: {error.strerror}") from None


def _put_in_place(path: Path, text: str) -> None:
    """Write a file whole or leave it as it was (OSError); what is no file (a pipe) is simply written to."""
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    files.replace(path, [text.encode()])


def print_text(text: str) -> None:
    """Write to standard output in one go, whatever its encoding has no sign for as a question mark."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()
