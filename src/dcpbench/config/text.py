"""Text from anywhere, as it may be shown, and what was meant by it."""

import difflib
import re
from collections.abc import Iterable, Sequence

_SHOWN = 12
"""So many of the names that there are stand in a sentence."""

_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def visible(text: str, but: str = "") -> str:
    """A text without what a terminal would obey: control characters, and those that turn the direction of
    writing, are written as escapes, `but` for some."""
    return _CONTROL.sub(lambda found: found[0] if found[0] in but else _escape(found[0]), text)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean parallel?`, or nothing where nothing is close."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def instead(word: str, known: Iterable[str]) -> str:
    """What was meant instead of a word that is not known, and what there is."""
    names = list(known)
    return f"{did_you_mean(word, names) or ';'} it may be {names_shown(names)}"


def names_shown(names: Sequence[str]) -> str:
    """Names between commas, the first of them where they are many."""
    return ", ".join(names if len(names) <= _SHOWN else [*names[:_SHOWN], f"... ({len(names)} in all)"])


def counted(number: int, what: str) -> str:
    """`1 cell`, `1,000 cells`."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def duration_text(seconds: float) -> str:
    """`45 s`, `12 min`, `3 h 20 min`: as exact as an estimate deserves."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


def _escape(sign: str) -> str:
    return sign.encode("unicode_escape").decode()
