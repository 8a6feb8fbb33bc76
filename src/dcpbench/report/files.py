"""Where reports go: standard output, a file that the user names, and a sweep's folder."""

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from dcpbench.analysis.frame import Sweeps, read_sweeps
from dcpbench.analysis.query import QueryError
from dcpbench.records.store import ResultsError
from dcpbench.report.junit import junit
from dcpbench.report.page import page
from dcpbench.report.show_document import content
from dcpbench.report.terminal import rendered


def write_reports(folder: Path, sweeps: Sweeps | None = None) -> None:
    """Make `report.html` and `junit.xml` again from the rows of a sweep, which are `sweeps` if these were
    read already.

    Raises:
        dcpbench.records.store.ResultsError: the folder holds no results.
        OSError: one of them cannot be written, and is what it was.
    """
    sweeps = sweeps or read_sweeps([folder])
    _write_whole(folder / "report.html", page(sweeps, folder.resolve().name))
    _write_whole(folder / "junit.xml", junit(sweeps))


def print_report(folder: Path) -> None:
    """Print a sweep's table and what did not pass, from its rows, to standard output.

    Raises:
        dcpbench.records.store.ResultsError: the folder holds no results.
    """
    _print_text(rendered(content(read_sweeps([folder])), sys.stdout))


def add_output(parser: argparse.ArgumentParser, formats: Mapping[str, str], help: str | None = None) -> None:
    """The options `--format` and `-o`, for `format_of` and `put_out`; `formats` has each suffix's."""
    parser.add_argument("--format", choices=list(formats.values()), help=help)
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="write there, whole or not at all; its suffix tells the format",
    )


def format_of(asked: argparse.Namespace, formats: Mapping[str, str]) -> str:
    """The format that was asked for, or that the file's suffix stands for; a table where there is no file.

    Raises:
        QueryError: it stands for none.
    """
    output: Path | None = asked.output
    if asked.format or output is None:
        return asked.format or "table"
    if output.suffix in formats:
        return formats[output.suffix]
    raise QueryError(
        f"-o {output}: say with --format what to write; {', '.join(formats)} speak for themselves"
    )


def put_out(text: str, output: Path | None) -> None:
    """Write a file, whole or not at all; without one to standard output, which may be a pipe whose reader has
    seen enough.

    Raises:
        dcpbench.records.store.ResultsError: it cannot be written to.
    """
    try:
        if output is None:
            _print_text(text)
        else:
            _write_whole(output, text)
    except OSError as error:
        if output is not None:
            raise QueryError(f"-o {output}: cannot be written: {error.strerror}") from None
        # Python is not to try again at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            raise ResultsError(f"standard output cannot be written to: {error.strerror}") from None


def _write_whole(path: Path, text: str) -> None:
    """Write a file that is there whole or not at all; what is no file (a pipe) is simply written to.

    Raises:
        OSError: it cannot be written, and is what it was.
    """
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    beside = path.with_name(path.name + ".tmp")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise


def _print_text(text: str) -> None:
    """Write to standard output in one go, whatever its encoding has no sign for as a question mark."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()
