"""What a report consists of, whatever it is written on."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pandas as pd

_MOST_DAMAGED = 5
_FAILURES = ("status", "cell", "reason", "again", "more")


@dataclass(frozen=True)
class Table:
    """A table of text, or of `rich.text.Text`; newlines break the head of a column into lines.

    Args:
        statuses: the columns that hold statuses.
        heading: a column for Markdown, which in the terminal stands above the rows that have the same value.
        below: a column whose texts stand in the terminal below these rows, after what is first in theirs.
    """

    title: str
    table: pd.DataFrame
    statuses: tuple[str, ...] = ()
    heading: str = ""
    below: str = ""


@dataclass(frozen=True)
class Content:
    """Tables, then failures, then sentences.

    Args:
        failures: `status`, `cell`, `reason`, `again` (empty: nothing to run again), `more`, perhaps `runs`.
        more: how many failures there are beside these, and where there is more of them.
        damaged: what could not be read.
        headline: how many cells there are with which result.
    """

    tables: list[Table] = field(default_factory=list)
    failures: pd.DataFrame = field(default_factory=lambda: pd.DataFrame(columns=_FAILURES))
    more: str = ""
    damaged: Sequence[str] = ()
    headline: str = ""


def first_of(sentences: Sequence[str]) -> list[str]:
    """The first of many sentences about damaged lines, and how many more there are."""
    if len(sentences) <= _MOST_DAMAGED + 1:
        return list(sentences)
    return [*sentences[:_MOST_DAMAGED], f"and {len(sentences) - _MOST_DAMAGED} more damaged lines"]
