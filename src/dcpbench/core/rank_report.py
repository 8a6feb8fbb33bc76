"""What one rank hands to the driver at the end of a stage. Plain data: ranks send it, the driver reads it."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dcpbench.core.metrics import Measurement
from dcpbench.core.mismatch import Mismatch

_KEPT = 10
"""How many mismatches a report carries for each check; the number of all of them is kept beside."""


@dataclass(frozen=True)
class Compared:
    """The result of a comparison and of its negative control, without which nothing is recorded.

    Args:
        found: every mismatch.
        names: the names that were compared; False for those that only other ranks have anything of.
        fired: for each name that this rank has something of, whether the control was reported as different.
    """

    found: Sequence[Mismatch]
    names: Mapping[str, bool]
    fired: Mapping[str, bool]

    @classmethod
    def of(
        cls,
        found: Iterable[Mismatch],
        control: Iterable[Mismatch],
        names: Iterable[str] | Mapping[str, bool],
    ) -> "Compared":
        """Make it from what the same comparison found in a case that is wrong on purpose (`control`), where
        it has to report each of these names."""
        had = names if isinstance(names, Mapping) else dict.fromkeys(names, True)
        reported = {finding.name for finding in control}
        return cls([*found], had, {name: name in reported for name, here in had.items() if here})

    def __add__(self, other: "Compared") -> "Compared":
        """Put two results of one check together."""
        found = [*self.found, *other.found]
        return Compared(found, {**self.names, **other.names}, {**self.fired, **other.fired})


NOTHING = Compared((), {}, {})
"""Recorded by a rank that has nothing to compare."""


@dataclass
class CheckReport:
    """What one rank saw of one check, over all checkpoints of the cell.

    `first` is its first mismatch, `worst` are the worst ones, the worst first. `distinct` has the worst of
    each name, problem, place and defect: nothing that differs is left out of it.
    `compared` says at each place (a checkpoint, a moment) of each name that was to be compared whether this
    rank had any of it, `control` whether the negative control there was reported as different.
    """

    first: Mismatch | None = None
    worst: list[Mismatch] = field(default_factory=list)
    count: int = 0
    distinct: dict[tuple[str, ...], Mismatch] = field(default_factory=dict)
    compared: dict[str, dict[str, bool]] = field(default_factory=dict)
    control: dict[str, dict[str, bool]] = field(default_factory=dict)

    def record(self, compared: Compared, where: str) -> None:
        """Add the result of a comparison at a place. A control has to fire each time."""
        self.add(replace(mismatch, where=where) for mismatch in compared.found)
        self.compared.setdefault(where, {}).update(compared.names)
        seen = self.control.setdefault(where, {})
        seen.update({name: did and seen.get(name, True) for name, did in compared.fired.items()})

    def add(self, mismatches: Iterable[Mismatch]) -> None:
        """Add mismatches."""
        for mismatch in mismatches:
            self.count += 1
            self.first = self.first or mismatch
            alike = (mismatch.name, mismatch.problem.value, mismatch.where, mismatch.by or "")
            self.distinct[alike] = max(self.distinct.get(alike, mismatch), mismatch, key=_farness)
            self.worst = sorted([*self.worst, mismatch], key=badness, reverse=True)[:_KEPT]

    @property
    def max_abs_diff(self) -> float:
        """The largest distance that was seen; 0 where nothing differs or no distance can be determined."""
        return max((mismatch.max_abs_diff or 0.0 for mismatch in self.worst), default=0.0)


def _farness(mismatch: Mismatch) -> float:
    """How far it is as a part of the largest magnitude, which is what known failures are bounded by."""
    share = mismatch.facts.get("share")
    return math.inf if share is None or math.isnan(share) else float(share)


def badness(mismatch: Mismatch) -> float:
    """What cannot be measured (a missing key, another dtype, not a number) is worse than any distance."""
    distance = mismatch.max_abs_diff
    return math.inf if distance is None or math.isnan(distance) else distance


class Skip(Exception):  # noqa: N818 - it is no error
    """This torch or this machine cannot do what the cell is about, which only a rank can find out."""


class NothingToInjectError(Exception):
    """This cell has nothing into which its fault could be injected, or the fault would change nothing."""


@dataclass
class RankReport:
    """Results of one rank in one stage of a cell.

    Args:
        local_rank: its number on its `host`.
        losses: of the reference run and of the twin, from step 1.
        resumed: losses of the steps after each checkpoint, by the checkpoint's step.
        skip: why there is nothing to report.
        not_applied: why checks were not run here.
        bounds: how gradients and optimizer steps were compared with the twin's.
        not_compiled: in a compiled cell, why some or all of it ran as eager code.
        graph_breaks: in a compiled cell, where Dynamo broke a graph, and why.
        left_behind: differences of its process from the time before the cell.
        late_files: files that its host saw later than another host.
        interpreter: the interpreter that it ran under, if that is not the driver's.
        replaced: names of values that JSON cannot contain and were replaced by text or null.
    """

    rank: int
    checks: dict[str, CheckReport] = field(default_factory=dict)
    measurements: list[Measurement] = field(default_factory=list)
    losses: dict[str, list[float]] = field(default_factory=dict)
    resumed: dict[int, list[float]] = field(default_factory=dict)
    not_compiled: str | None = None
    graph_breaks: list[str] = field(default_factory=list)
    skip: str | None = None
    not_applied: dict[str, str] = field(default_factory=dict)
    bounds: dict[str, str] = field(default_factory=dict)
    left_behind: list[str] = field(default_factory=list)
    late_files: list[str] = field(default_factory=list)
    host: str | None = None
    local_rank: int | None = None
    interpreter: str | None = None
    replaced: list[str] = field(default_factory=list)

    def plain(self) -> dict[str, Any]:
        """Return it for a row's details, without checks and measurements, which have their own places."""
        elsewhere = ("checks", "measurements", "skip", "replaced")
        return {name: value for name, value in vars(self).items() if name not in elsewhere}
