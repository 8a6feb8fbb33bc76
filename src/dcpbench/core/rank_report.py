"""The report that a rank sends to the driver at the end of a stage. Plain data."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dcpbench.core.metrics import Measurement
from dcpbench.core.mismatch import Mismatch, Place, Sides
from dcpbench.core.notes import Note


@dataclass(frozen=True)
class Compared:
    """The result of a comparison together with that of its negative control.

    >>> from dcpbench.core.mismatch import Problem
    >>> wrong_on_purpose = [Mismatch("net1.weight", Problem.differs)]
    >>> Compared.of(found=[], control=wrong_on_purpose, names=["net1.weight"]).detected
    {'net1.weight': True}

    Args:
        found: every mismatch.
        names: the names that were compared; False if only other ranks have a part of it.
        detected: for each name that this rank has a part of, True if the control reported it as different.
    """

    found: Sequence[Mismatch]
    names: Mapping[str, bool]
    detected: Mapping[str, bool]

    @classmethod
    def of(
        cls,
        found: Iterable[Mismatch],
        control: Iterable[Mismatch],
        names: Iterable[str] | Mapping[str, bool],
    ) -> "Compared":
        """Return it for these mismatches; `control` are those that the same comparison found in data that
        is wrong under each of the names on purpose."""
        compared = names if isinstance(names, Mapping) else dict.fromkeys(names, True)
        reported = {mismatch.name for mismatch in control}
        return cls([*found], compared, {name: name in reported for name, here in compared.items() if here})

    def __add__(self, other: "Compared") -> "Compared":
        """Merge two results of one check."""
        found = [*self.found, *other.found]
        return Compared(found, {**self.names, **other.names}, {**self.detected, **other.detected})


NOTHING = Compared((), {}, {})
"""The result of a rank that has nothing to compare."""


@dataclass
class CheckReport:
    """The results of one check on one rank, over all checkpoints of the cell.

    >>> report = CheckReport()
    >>> report.record(Compared((), {"lr": True}, {"lr": True}), Place("checkpoint", 4))
    >>> report.count, report.control[Place("checkpoint", 4)]
    (0, {'lr': True})

    Args:
        first: the first mismatch.
        count: number of all mismatches.
        max_abs_diff: largest absolute difference; 0 if nothing differs or no difference is a number.
        distinct: the worst mismatch for each name, problem, place and defect.
        compared: by place and name, True if this rank had a part to compare.
        control: by place and name, True if the negative control was reported as different each time.
    """

    first: Mismatch | None = None
    count: int = 0
    max_abs_diff: float = 0.0
    distinct: dict[tuple[Any, ...], Mismatch] = field(default_factory=dict)
    compared: dict[Place, dict[str, bool]] = field(default_factory=dict)
    control: dict[Place, dict[str, bool]] = field(default_factory=dict)

    def record(self, compared: Compared, where: Place, sides: Sides | None = None) -> None:
        """Add the result of a comparison, of these sides unless its mismatches name theirs, at a place."""
        if compared.found:
            self.add(
                replace(mismatch, where=where, sides=mismatch.sides or sides) for mismatch in compared.found
            )
        self.compared.setdefault(where, {}).update(compared.names)
        control = self.control.setdefault(where, {})
        missed = [name for name, did in control.items() if not did]
        control.update(compared.detected)
        control.update(dict.fromkeys(missed, False))

    def add(self, mismatches: Iterable[Mismatch]) -> None:
        """Add mismatches."""
        for mismatch in mismatches:
            self.count += 1
            self.first = self.first or mismatch
            key = (mismatch.name, mismatch.problem.value, mismatch.where, mismatch.by or "")
            self.distinct[key] = max(self.distinct.get(key, mismatch), mismatch, key=_farness)
            if math.isfinite(distance := badness(mismatch)):
                self.max_abs_diff = max(self.max_abs_diff, float(distance))


def _farness(mismatch: Mismatch) -> float:
    """Return the difference as a fraction of the largest magnitude, which known failures limit (`within`)."""
    share = mismatch.facts.get("share")
    return math.inf if share is None or math.isnan(share) else float(share)


def badness(mismatch: Mismatch) -> float:
    """Return a sort key. Anything without a distance (a missing key, another dtype, NaN) is the worst."""
    distance = mismatch.max_abs_diff
    return math.inf if distance is None or math.isnan(distance) else distance


class Skip(Exception):  # noqa: N818 - it is not an error
    """This torch or this machine cannot run the cell, which only a rank can find out."""


@dataclass(frozen=True)
class Imports:
    """Modules of installed packages that a rank has imported, in order, and the environment variables that it
    had in addition to its server's."""

    modules: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()


@dataclass
class RankReport:
    """The results of one rank in one stage of a cell.

    >>> report = RankReport(0, checks={"model_equal": CheckReport()}, losses={"twin": [2.1, 1.9]})
    >>> sorted(report.plain())[:3]
    ['host', 'interpreter', 'local_rank']

    Args:
        local_rank: number of the rank on its `host`.
        checks: by the name of the check.
        losses: losses of the reference run and of the twin, from step 1.
        resumed: by the step of a checkpoint, the losses after it was loaded.
        skip: why the rank could not run the cell.
        training_from: the cell on these ranks whose run that never saves it shares, with the verdict on that.
        notes: what was not compared and why, and other facts that fail no check.
        not_compiled: in a compiled cell, why some or all of it ran as eager code.
        imports: what its process has imported, which later ranks need not import again.
        during: which save or load the run that is built or trains comes before or after.
        raised_by: the known defect of torch that made a load raise, if one did.
        interpreter: the Python that it ran under, if it is not the driver's.
        replaced: names of values that JSON cannot contain and that were replaced by text or null.
    """

    rank: int
    checks: dict[str, CheckReport] = field(default_factory=dict)
    measurements: list[Measurement] = field(default_factory=list)
    losses: dict[str, list[float]] = field(default_factory=dict)
    resumed: dict[int, list[float]] = field(default_factory=dict)
    not_compiled: str | None = None
    skip: str | None = None
    training_from: str | None = None
    notes: list[Note] = field(default_factory=list)
    imports: Imports = field(default_factory=Imports)
    during: Place | None = None
    raised_by: str | None = None
    host: str | None = None
    local_rank: int | None = None
    interpreter: str | None = None
    replaced: list[str] = field(default_factory=list)

    def note(self, kind: str, text: str, check: str = "", name: str = "", place: Place | None = None) -> None:
        """Add a note, once."""
        note = Note(kind, text, check, name, place)
        if note not in self.notes:
            self.notes.append(note)

    def texts(self, kind: str) -> list[str]:
        """Return the texts of all notes of a kind."""
        return [note.text for note in self.notes if note.kind == kind]

    def plain(self) -> dict[str, Any]:
        """Return it as a dict for the row's details, without the fields that are stored elsewhere."""
        elsewhere = ("checks", "measurements", "skip", "replaced", "during", "raised_by", "imports")
        kept = {
            name: value for name, value in vars(self).items() if name not in (*elsewhere, "training_from")
        }
        return {**kept, "notes": [note.plain() for note in self.notes]}
