"""The options that the commands of a report share: in which format, and where their text goes."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from dcpbench.analysis.frame import records
from dcpbench.analysis.query import QueryError
from dcpbench.config.text import visible
from dcpbench.records import files
from dcpbench.report.styles import standard_output

_FORMULA = (*"=+-@", *"\uff1d\uff0b\uff0d\uff20")
"""The characters that begin a formula in a spreadsheet, in both widths."""


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
            entries = [_csv_entry(value) for value in table[name]]
            table[name] = pd.Series(entries, table.index, dtype=object)
        return str(table.to_csv(index=False))
    return json.dumps(records(table), indent=1, allow_nan=False) + "\n"


def _csv_entry(value: object) -> object:
    if not isinstance(value, str):
        return value
    shown = visible(value, but="\n\t")
    if shown.lstrip()[:1] not in _FORMULA:
        return shown
    try:
        float(shown)
    except ValueError:
        return f"'{shown}"
    return shown


def put_out(text: str, output: Path | None) -> None:
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
