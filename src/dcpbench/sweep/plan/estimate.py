"""How long cells will take, from what cells like them took."""

import statistics
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from dcpbench.config.cell_key import CellKey
from dcpbench.records.row import Row
from dcpbench.records.store import RESULTS_JSONL, stored_rows

_ALIKE = (
    ("scenario.name", "parallel.name", "load_parallel.name", "compile", "model.name", "device", "world_size"),
    ("scenario.name", "parallel.name", "compile", "device", "world_size"),
    ("scenario.name", "compile", "device", "world_size"),
)
"""The parts of their identities in which two cells have to agree to be alike, the closest likeness first;
closer still are those of one identity."""
_KEPT = 25


class Estimated(NamedTuple):
    """A cell by what it is known by, and how many run `at_once` where it does."""

    keys: list[str]
    at_once: int


def keys(cell: CellKey) -> list[str]:
    """What a cell is known by at each likeness."""
    return [cell.digest, *(f"{number} {cell.part(alike)}" for number, alike in enumerate(_ALIKE))]


@dataclass
class Times:
    """Seconds that cells took, the latest few for each likeness."""

    _taken: dict[str, deque[float]] = field(default_factory=dict)

    def add(self, row: Row) -> None:
        """Take note of a cell that has ended; one that did not run says nothing."""
        took_s = row["shared_cell_s"] if row["cell_s"] is None else row["cell_s"]
        if took_s is not None:
            for key in keys(CellKey(row.config)):
                self._taken.setdefault(key, deque(maxlen=_KEPT)).append(took_s)

    def of(self, cell: Iterable[str]) -> float | None:
        """The median seconds of the cells that are closest to one with these keys, None if there are
        none."""
        found = next((taken for key in cell if (taken := self._taken.get(key))), None)
        return statistics.median(found) if found else None

    def left(self, cells: Iterable[Estimated]) -> float | None:
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


def newest_like(folder: Path, cells: list[Estimated]) -> tuple[Path, Times] | None:
    """The newest sweep beside `folder`, itself left out, that has times for any of these cells."""
    for other in _newest_first(folder):
        times = times_of(stored_rows(other))
        if any(times.of(cell.keys) is not None for cell in cells):
            return other, times
    return None


def _newest_first(folder: Path) -> Iterator[Path]:
    found = [path for path in folder.parent.glob(f"*/{RESULTS_JSONL}") if path.parent != folder]
    return (path.parent for path in sorted(found, key=lambda path: path.stat().st_mtime, reverse=True))


def duration_text(seconds: float) -> str:
    """`45 s`, `12 min`, `3 h 20 min`: as exact as an estimate deserves."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min"
