"""The style of statuses and tables in the terminal. The driver imports it, so it needs no pandas."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.text import Text

from dcpbench.config.text import visible
from dcpbench.core.statuses import BAD, SHOWN
from dcpbench.records.store import ResultsError


def style_of(status: str) -> str:
    """Return the style of a status; an unknown one looks like a failure."""
    return SHOWN[status].style if status in SHOWN else BAD


def text_of(words: str, style: str = "") -> Text:
    """Return words as text: without markup, and with control characters escaped."""
    return Text(visible(words), style)


def print_error(sentence: str, command: str = "dcpbench") -> None:
    """Print to standard error what a command could not do."""
    sys.stderr.write(f"{command}: {visible(sentence)}\n")


@contextmanager
def standard_output() -> Iterator[None]:
    """Context manager: write to standard output, ignore a closed pipe, raise ResultsError if it fails."""
    try:
        yield
    except OSError as error:
        # Otherwise Python writes the rest when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            raise ResultsError(f"standard output cannot be written to: {error.strerror}") from None


def without_trailing_blanks(text: str) -> str:
    """Return lines without the blanks that rich ends each line of a table with."""
    return "\n".join(line.rstrip(" ") for line in text.split("\n"))
