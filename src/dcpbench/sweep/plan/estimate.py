"""How long cells will take, from what cells like them took."""

import statistics
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from dcpbench.records.store import RESULTS_JSONL, Row, stored_rows

_ALIKE: tuple[tuple[str, ...], ...] = (
    ("config_digest",),
    ("scenario", "parallel", "load_parallel", "compile", "model", "device", "world_size"),
    ("scenario", "parallel", "compile", "device", "world_size"),
    ("scenario", "compile", "device", "world_size"),
)
"""The columns in which two cells have to agree to be alike, the closest likeness first."""
_KEPT = 25

Key = tuple[object, ...]


class Asked(NamedTuple):
    """A cell by what it is known by, and how many run `at_once` where it does."""

    keys: list[Key]
    at_once: int


def keys(row: Row) -> list[Key]:
    """What a cell is known by at each likeness; its row need not say yet how it ended."""
    alike = _ALIKE if row.config_digest else _ALIKE[1:]
    return [(columns, *(getattr(row, column) for column in columns)) for columns in alike]


@dataclass
class Times:
    """Seconds that cells took, the latest few for each likeness."""

    _taken: dict[Key, deque[float]] = field(default_factory=dict)

    def add(self, row: Row) -> None:
        """Take note of a cell that has ended; one that did not run says nothing."""
        took_s = row.shared_cell_s if row.cell_s is None else row.cell_s
        if took_s is not None:
            for key in keys(row):
                self._taken.setdefault(key, deque(maxlen=_KEPT)).append(took_s)

    def of(self, cell: Iterable[Key]) -> float | None:
        """The median seconds of the cells that are closest to one with these keys, None if there are
        none."""
        found = next((taken for key in cell if (taken := self._taken.get(key))), None)
        return statistics.median(found) if found else None

    def left(self, cells: Iterable[Asked]) -> float | None:
        """Seconds for all of these cells; those that are like none so far take as long as the others do.
        None if there is nothing to go by."""
        known: list[float] = []
        whole = unknown = 0.0
        for cell in cells:
            seconds = self.of(cell.keys)
            if seconds is None:
                unknown += 1 / cell.at_once
            else:
                known.append(seconds)
                whole += seconds / cell.at_once
        return whole + unknown * statistics.fmean(known) if known else None


def times_of(rows: Iterable[Row]) -> Times:
    """The times of a sweep."""
    times = Times()
    for row in rows:
        times.add(row)
    return times


def newest_like(folder: Path, cells: list[Asked]) -> tuple[Path, Times] | None:
    """The newest sweep beside `folder`, itself left out, that has times for any of these cells."""
    for other in _newest_first(folder):
        times = times_of(stored_rows(other))
        if any(times.of(cell.keys) is not None for cell in cells):
            return other, times
    return None


def _newest_first(folder: Path) -> Iterator[Path]:
    found = [path for path in folder.parent.glob(f"*/{RESULTS_JSONL}") if path.parent != folder]
    return (path.parent for path in sorted(found, key=lambda path: path.stat().st_mtime, reverse=True))


def in_words(seconds: float) -> str:
    """`45 s`, `12 min`, `3 h 20 min`: as exact as an estimate deserves."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"
