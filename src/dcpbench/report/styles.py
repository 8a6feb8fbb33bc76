"""How statuses and tables look in the terminal. Without pandas, for what the driver prints."""

from typing import TextIO

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

_UNFOLDED = 1000
_STYLES = {
    "pass": "green",
    "skip": "dim",
    "xfail": "yellow",
    "xpass": "bold yellow",
    "vacuous": "bold magenta",
}
BAD = "bold red"


def style_of(status: str) -> str:
    """The style of a status; what is not known to be harmless stands out."""
    return _STYLES.get(status, BAD)


def console_for(*tables: Table, file: TextIO | None = None) -> Console:
    """A console on standard output or this file, wide enough for these: rows are long lines, never folded."""
    wide = Console(width=_UNFOLDED)
    needed = (Measurement.get(wide, wide.options, table).maximum for table in tables)
    return Console(width=max([Console(file=file).width, *needed]), file=file)
