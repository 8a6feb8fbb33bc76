"""What a history has to tell: which cells, in which order, and what changed at which sweep."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dcpbench.analysis.cell_matrix import History
from dcpbench.analysis.change_points import Change, changes
from dcpbench.analysis.frame import AXES
from dcpbench.analysis.status_codes import ABSENT, KINDS, Kind


@dataclass(frozen=True)
class Cost:
    """One metric of a cell over the sweeps: its medians, NaN where not measured, and where they changed."""

    metric: str
    medians: npt.NDArray[np.float64]
    changes: list[Change]

    @property
    def latest(self) -> float:
        """The newest that was measured; NaN if none was."""
        measured = self.medians[~np.isnan(self.medians)]
        return float(measured[-1]) if measured.size else float("nan")


@dataclass(frozen=True)
class Story:
    """One cell. `last_seen` is the last sweep that has it and `since` the one from which on it came to what
    it is now; `before` is what it came to before that. Both are None if it never was otherwise."""

    number: int
    name: str
    kinds: tuple[int, ...]
    last_seen: int
    since: int | None
    before: Kind | None
    costs: list[Cost]
    reason: str

    @property
    def now(self) -> Kind:
        """What it came to in the last sweep that has it."""
        return KINDS[self.kinds[self.last_seen]]

    @property
    def changed(self) -> int:
        """The last sweep at which its status or a cost of it changed; -1 if there is none."""
        of_costs = [change.at for cost in self.costs for change in cost.changes]
        return max([-1 if self.since is None else self.since, *of_costs])


def stories(told: History) -> list[Story]:
    """All cells: what changed last comes first, and of these what is not well."""
    found = _changes(told)
    names = cell_names(told)
    cells = [
        Story(
            number,
            names[number],
            tuple(int(kind) for kind in told.kinds[number]),
            *_statuses(told.kinds[number]),
            [Cost(name, values[number], found[name][number]) for name, values in told.costs.items()],
            told.reasons[number],
        )
        for number in range(len(told.cells))
    ]
    return sorted(cells, key=lambda cell: (-cell.changed, cell.now.well, cell.number))


def cell_names(told: History) -> list[str]:
    """The axes in which cells differ, and parallelism in any case, then the other overrides if they do."""
    axes = [axis for axis in AXES if axis == "parallel" or told.cells[axis].nunique() > 1]
    texts = [[f"{axis}={said}" for said in told.cells[axis]] for axis in axes]
    if told.cells["others"].nunique() > 1:
        texts.append(list(told.cells["others"]))
    return [" ".join(filter(None, parts)) for parts in zip(*texts, strict=True)]


@dataclass(frozen=True)
class Folded:
    """Which cells are `shown` one by one: those that are not well, and those in which something changed in
    the sweeps that are visible. The others are well now: `even` all along, or since something changed
    `earlier`. Cells that none of the visible sweeps has are nowhere."""

    shown: list[Story]
    even: list[Story]
    earlier: list[Story]


def folded(cells: Sequence[Story], visible: int, every: bool = False) -> Folded:
    """What is shown of these cells where so many of the newest sweeps are visible; all if `every`, or if
    there is but one sweep."""
    if every or not cells or len(cells[0].kinds) == 1:
        return Folded(list(cells), [], [])
    first = max(0, len(cells[0].kinds) - visible)
    there = [cell for cell in cells if cell.last_seen >= first]
    others = [cell for cell in there if cell.now.well and cell.changed < first]
    shown = [cell for cell in there if not cell.now.well or cell.changed >= first]
    even, earlier = ([cell for cell in others if (cell.changed < 0) is never] for never in (True, False))
    return Folded(shown, even, earlier)


def _changes(told: History) -> dict[str, list[list[Change]]]:
    """The changes of each metric's series: all of them are looked at together, for one rate."""
    if not told.costs:
        return {}
    cells = len(told.cells)
    found = changes(np.concatenate(list(told.costs.values())))
    return {name: found[place * cells : (place + 1) * cells] for place, name in enumerate(told.costs)}


def _statuses(kinds: npt.NDArray[np.int8]) -> tuple[int, int | None, Kind | None]:
    """The last sweep that has the cell, the one from which on it came to that, and what it was before."""
    seen = np.flatnonzero(kinds != ABSENT)
    turns = np.flatnonzero(kinds[seen][1:] != kinds[seen][:-1])
    if not turns.size:
        return int(seen[-1]), None, None
    return int(seen[-1]), int(seen[turns[-1] + 1]), KINDS[kinds[seen[turns[-1]]]]
