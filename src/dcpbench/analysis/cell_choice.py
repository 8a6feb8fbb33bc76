"""Find one cell of a sweep by its name, its number, or any part of it that no other cell has."""

import re
from collections.abc import Sequence
from typing import Any

import pandas as pd

from dcpbench.analysis.cell_identity import override_words
from dcpbench.analysis.frame import as_text, is_true, plain_rows
from dcpbench.analysis.query import QueryError
from dcpbench.analysis.runs import cell_numbers, row_names
from dcpbench.config.text import counted, did_you_mean, names_shown
from dcpbench.core.axes import AXES

_APART = re.compile(r"[\s,]+")


def runs_of(frame: pd.DataFrame, asked: Sequence[str]) -> pd.DataFrame:
    """Return the runs of the requested cell, with their cell's `number`, from 1, and short `name`.

    Args:
        asked: the name of a cell, full or short; its number; or words that only it has, in any order:
            `parallel=ddp`, `ddp`, or a part of them. Nothing, if there is only one cell.

    Raises:
        QueryError: no cell or several cells have these words; it names them.
    """
    text = " ".join(asked)
    frame = frame.assign(number=cell_numbers(frame) + 1, name=row_names(frame))
    words = [_words_of(row) for row in plain_rows(frame)]
    matching = frame[_matching(frame, text, words)] if text else frame
    cells = matching.drop_duplicates("number")
    if len(cells) == 1:
        return matching
    if cells.empty:
        why = "no cell has all of these words"
        known = dict.fromkeys(word for of in words for word in of)
        unknown = [word for word in _words(text) if not any(word in known_word for known_word in known)]
        if text.isdecimal():
            why = f"no such cell; their numbers are 1 to {frame['number'].max()}"
        elif unknown:
            why = f"no cell has {unknown[0]}{did_you_mean(unknown[0], known)}"
        raise QueryError(f"{text}: {why}")
    listed = names_shown([f"{number} {name}" for number, name in zip(cells.number, cells.name, strict=True)])
    head, fix = (f"{text}: ", "add a word") if text else ("", "name one")
    raise QueryError(f"{head}{counted(len(cells), 'cell')}: {listed}; {fix}, or give its number")


def _matching(frame: pd.DataFrame, text: str, words: Sequence[Sequence[str]]) -> "pd.Series[bool]":
    """Return which rows a text matches: by name or number, else by complete words, else by parts of them."""
    if text.isdecimal():
        return frame["number"].eq(int(text[:9]))
    asked = _words(text)
    complete = [all(word in of for word in asked) for of in words]
    partly = [all(any(word in known_word for known_word in of) for word in asked) for of in words]
    named = is_true(frame["cell"].eq(text) | frame["name"].eq(text))
    ways = (named, *(pd.Series(matches, frame.index, dtype=bool) for matches in (complete, partly)))
    return next((matches for matches in ways if matches.any()), named)


def _words(text: str) -> list[str]:
    return [word for word in _APART.split(text.lower()) if word]


def _words_of(row: dict[str, Any]) -> list[str]:
    """Return the words of a row's cell: its overrides, its axes, their values, and its repeat."""
    axes = {axis: as_text(row[axis]) for axis in AXES if row[axis] is not None}
    named = [f"{axis}={axis_value}" for axis, axis_value in axes.items()]
    words = [*override_words(row["overrides"]), f"repeat={row['repeat']}", *_words(str(row["cell"]))]
    texts = [*words, *named, *axes.values()]
    return [text.lower() for text in texts]
