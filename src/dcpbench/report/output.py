"""Where a report goes: standard output, or a file whose suffix tells the format."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from dcpbench.report.text import print_text
from dcpbench.report.where import QueryError
from dcpbench.report.write import write_whole
from dcpbench.results import ResultsError


def format_of(output: Path | None, suffixes: Mapping[str, str]) -> str:
    """The format that the suffix of a file stands for; a table where there is no file.

    Raises:
        QueryError: it stands for none.
    """
    if output is None or output.suffix in suffixes:
        return suffixes[output.suffix] if output else "table"
    raise QueryError(
        f"-o {output}: say with --format what to write; {', '.join(suffixes)} speak for themselves"
    )


def write_output(path: Path, text: str) -> None:
    """Write a file whole or not at all.

    Raises:
        QueryError: it cannot be written.
    """
    try:
        write_whole(path, text)
    except OSError as error:
        raise QueryError(f"-o {path}: cannot be written: {error.strerror}") from None


def print_whole(text: str) -> None:
    """Write to standard output, which may be a pipe whose reader has seen enough.

    Raises:
        dcpbench.results.ResultsError: it cannot be written to.
    """
    try:
        print_text(text)
    except OSError as error:
        # Python is not to try again at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            raise ResultsError(f"standard output cannot be written to: {error.strerror}") from None
