"""How statuses and tables look in the terminal. Without pandas, for what the driver prints."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from dcpbench.config.text import visible
from dcpbench.core.statuses import BAD, SHOWN
from dcpbench.records.store import ResultsError

_UNFOLDED = 1000


def style_of(status: str) -> str:
    """The style of a status; what is not known to be harmless stands out."""
    return SHOWN[status].style if status in SHOWN else BAD


def text_of(words: str, style: str = "") -> Text:
    """Words as they are shown: no markup is taken out of them, and nothing that a terminal would obey."""
    return Text(visible(words), style)


def complain(sentence: str, command: str = "dcpbench") -> None:
    """Tell on standard error what a command could not do."""
    sys.stderr.write(f"{command}: {visible(sentence)}\n")


@contextmanager
def standard_output() -> Iterator[None]:
    """Write to standard output, perhaps a closed pipe; ResultsError if that cannot be done."""
    try:
        yield
    except OSError as error:
        # Python is not to try again at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            raise ResultsError(f"standard output cannot be written to: {error.strerror}") from None


def print_table(table: Table, fits: bool = False) -> None:
    """Print a table to standard output, its lines as long as they are, without blanks at their ends where
    no terminal shows them; with `fits` a terminal's lines are folded to its width."""
    console = console_for(*([] if fits and Console().is_terminal else [table]))
    with console.capture() as shown:
        console.print(table)
    print(without_trailing_blanks(shown.get()), end="")


def without_trailing_blanks(text: str) -> str:
    """Lines without the blanks that a table ends each of them with."""
    return "\n".join(line.rstrip(" ") for line in text.split("\n"))


def console_for(*tables: Table) -> Console:
    """A console on standard output, wide enough for these: rows are long lines, never folded."""
    wide = Console(width=_UNFOLDED)
    needed = (Measurement.get(wide, wide.options, table).maximum for table in tables)
    return Console(width=max([Console().width, *needed]))
