"""Text for terminals: values from anywhere made safe to show, near words, numbers with units."""

import difflib
import math
import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

_MOST_NAMES = 12
"""The most names that a sentence lists."""
_BYTES = (("B", 1), ("KiB", 2**10), ("MiB", 2**20), ("GiB", 2**30), ("TiB", 2**40), ("PiB", 2**50))
_SYNONYMS = {"gpu": "cuda", "gpus": "cuda"}
_FILE = re.compile(r"(?:.*/)?([A-Za-z_]\w*)\.py(?:::?([A-Za-z_][\w.]*))?")
_TARGET = re.compile(r"(?!\d)\w+(?:\.(?!\d)\w+)*(?::(?!\d)\w+(?:\.(?!\d)\w+)*)?")
_DOTTED = re.compile(r"[A-Za-z_]\w*(?:(?:\.|::?)[A-Za-z_]\w*)+")

_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def visible(text: str, but: str = "") -> str:
    """Return a text with escapes for control characters and for those that turn the direction of writing,
    except the characters in `but`: a terminal would obey them."""
    return _CONTROL.sub(
        lambda match: match[0] if match[0] in but else match[0].encode("unicode_escape").decode(), text
    )


def program() -> list[str]:
    """Return the words that start dcpbench, as they were typed: `dcpbench`, or `python -m dcpbench`."""
    as_module = Path(sys.argv[0]).parts[-2:] == ("dcpbench", "__main__.py")
    return [sys.orig_argv[0], "-m", "dcpbench"] if as_module else ["dcpbench"]


def command_text(name: str, *folders: Path) -> str:
    """Return a command of dcpbench as it can be typed here: started in the same way as this process."""
    return shlex.join([*program(), name, *map(path_text, folders)])


def path_text(path: Path) -> str:
    """Return a path, relative to the current folder if it is below."""
    with suppress(OSError, ValueError):  # it is not below, or the current folder was removed
        return str(path.relative_to(Path.cwd()))
    return str(path)


def near_name(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the known name that is closest to a word, if one is close; case is ignored."""
    names = {name.lower(): name for name in known}
    close = difflib.get_close_matches(_SYNONYMS.get(word.lower(), word.lower()), names, 1, cutoff)
    return names[close[0]] if close else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean parallel?`, or an empty text if no known name is close."""
    near = near_name(word, known)
    return f"; did you mean {near}?" if near else ""


def choices(word: str, known: Iterable[str]) -> str:
    """Return the end of a complaint about an unknown word: the name that is close to it, and all
    names unless there are many."""
    names = list(known)
    near = did_you_mean(word, names)
    if not near:
        return f"; choose one of {names_shown(names)}"
    return near if len(names) > _MOST_NAMES else f"{near} Choose one of {names_shown(names)}"


def as_target(text: str) -> str | None:
    """Return the dotted name that a text stands for, if it names a function or file of Python: `mine.build`
    for itself, `mine.py`, `./mine.py`, `src/mine.py::build` and `mine:build`; else None."""
    if file := _FILE.fullmatch(text):
        return f"{file[1]}.{file[2] or 'build'}"
    return re.sub(":+", ".", text) if _DOTTED.fullmatch(text) else None


def is_dotted(name: str) -> bool:
    """Return whether `pkgutil.resolve_name` takes a name: `mine.build` or `mine:Trainer.build`."""
    return _TARGET.fullmatch(name) is not None and not _FILE.fullmatch(name)


def names_shown(names: Sequence[str]) -> str:
    """Return names between commas; of many only the first ones."""
    return ", ".join(
        names if len(names) <= _MOST_NAMES else [*names[:_MOST_NAMES], f"... ({len(names)} in all)"]
    )


def listed(names: Sequence[str], most: int = 3, joint: str = " and") -> str:
    """Return names as words of a sentence.

    >>> listed(["a.py", "b.py", "c.py", "d.py", "e.py"])
    'a.py, b.py, c.py and 2 more'
    """
    more = f"{joint} {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def clipped(text: str, length: int = 300) -> str:
    """Return a text; if it is longer than this, its first words and its length."""
    if len(text) <= length:
        return text
    end = text.rfind(" ", length * 3 // 4, length + 1)
    return f"{text[: end if end > 0 else length]} ... ({len(text):,} characters)"


def done_text(done: int, cells: int, what: str = "cell") -> str:
    """Return how far a sweep has come: `2 of 12 cells done, 10 left`."""
    return f"{done:,} of {counted(cells, what)} done, {cells - done:,} left"


def counted(number: int, what: str) -> str:
    """Return `1 cell`, `1,000 cells`."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def cells_text(cells: int, runs: int, what: str = "cell") -> str:
    """Return `5 cells`, or `2 cells in 5 runs`."""
    return counted(cells, what) + (f" in {counted(runs, 'run')}" if runs > cells else "")


def byte_unit(number: float) -> tuple[str, int]:
    """Return the largest unit that is not more than this many bytes, and how many bytes it is."""
    return next(unit for unit in reversed(_BYTES) if number >= unit[1] or unit[1] == 1)


def size_text(number: float) -> str:
    """Return `12 B`, `3.7 KiB`, `1.0 GiB`; rounded half up, as bytes() of report/page/dom.js does."""
    name, size = byte_unit(number)
    return f"{math.floor(10 * number / size + 0.5) / 10:.1f} {name}" if size > 1 else f"{number:.0f} B"


def duration_text(seconds: float) -> str:
    """Return `45 s`, `12 min`, `3 h 20 min`: as exact as an estimate deserves."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
