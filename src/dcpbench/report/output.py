"""Where a report goes: standard output, or a file whose suffix tells the format."""

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from dcpbench.analysis.query import QueryError
from dcpbench.records.store import ResultsError
from dcpbench.report.files import write_whole
from dcpbench.report.terminal import print_text


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


def add_output(parser: argparse.ArgumentParser) -> None:
    """The option `-o`, for `format_of` and `put_out`."""
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="write there, whole or not at all; its suffix tells the format",
    )


def put_out(text: str, output: Path | None) -> None:
    """Write a file, whole or not at all; without one to standard output, which may be a pipe whose reader has
    seen enough.

    Raises:
        dcpbench.records.store.ResultsError: it cannot be written to.
    """
    if output is None:
        _print(text)
        return
    try:
        write_whole(output, text)
    except OSError as error:
        raise QueryError(f"-o {output}: cannot be written: {error.strerror}") from None


def _print(text: str) -> None:
    try:
        print_text(text)
    except OSError as error:
        # Python is not to try again at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            raise ResultsError(f"standard output cannot be written to: {error.strerror}") from None
