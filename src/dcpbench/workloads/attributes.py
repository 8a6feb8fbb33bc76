"""The attributes of a user's trainer, besides its model and its optimizers, and when each is compared."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from dcpbench.config.text import listed
from dcpbench.core.mismatch import Mismatch, Problem, Sides
from dcpbench.verify.compare import same_leaves
from dcpbench.verify.snapshot import Leaves, retained, snapshot_nested

_NOTHING = {"None", "absent"}
_OF_ATTRIBUTES: Sides = (
    "{} when saved",
    "{} after the load; if no checkpoint has to restore it, list it in not_saved",
)


class When(StrEnum):
    """When an attribute is compared: from the load on, from the first step after it on, or never."""

    loaded = "loaded"
    stepped = "stepped"
    never = "never"


Judged = dict[str, When]
"""When each attribute is compared that may change, by name; never without an entry."""


@dataclass
class Attributes:
    """The attributes of a trainer, by their names with dots.

    Args:
        held: those that are compared always.
        changing: those that are compared only if training changes them: what objects of the user's classes,
            these classes and functions have, and NumPy's values.
        when: of these, the earliest comparison.
        unreadable: the types of those that cannot be read.
    """

    held: dict[str, Any] = field(default_factory=dict)
    changing: dict[str, Any] = field(default_factory=dict)
    when: Judged = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)

    def leaves(self) -> tuple[Leaves, Leaves]:
        """Return what is held, and what may change."""
        return _leaves(self.held), _leaves(self.changing)


def _leaves(values: Mapping[str, Any]) -> Leaves:
    leaves: Leaves = {}
    for name, value in values.items():
        prefix, dot, last = name.rpartition(".")
        leaves |= snapshot_nested({last: value}, prefix + dot)
    return leaves


@dataclass(frozen=True)
class Untrained:
    """The attributes of a trainer before its first step: a copy of those that may change, and all names."""

    changing: Leaves
    names: frozenset[str]

    @classmethod
    def of(cls, attributes: Attributes) -> "Untrained":
        """Copy the attributes."""
        held, changing = attributes.leaves()
        return cls(retained(changing), frozenset({*held, *changing}))

    def judged(self, trained: Attributes) -> Judged:
        """Decide about each attribute that may change, given those after training. A step may make one that a
        new trainer does not have, and remove one, as when a list is no longer empty."""
        held, changing = trained.leaves()
        unchanged, remaining = same_leaves(self.changing, changing), held.keys() | changing.keys()
        judged = Judged()
        for name in {*self.changing, *changing}:
            judged[name] = When.never if name in unchanged else When.stepped
            if name not in unchanged and name in self.names & remaining:
                judged[name] = trained.when.get(name, When.loaded)
        return judged


def of_attributes(found: Iterable[Mismatch], saved: Leaves, restored: Leaves) -> list[Mismatch]:
    """Merge mismatches into one for each attribute that is None, or absent, either when saved or after the
    load."""
    merged: dict[str, Mismatch] = {}
    for mismatch in found:
        name = mismatch.name.partition(".")[0]
        expected, actual = (_described(name, leaves) for leaves in (saved, restored))
        if _NOTHING.isdisjoint((expected, actual)):
            merged[mismatch.name] = mismatch
        else:
            facts = {"expected": expected, "actual": actual}
            merged[name] = Mismatch(name, Problem.value, "attribute", facts=facts, sides=_OF_ATTRIBUTES)
    return [*merged.values()]


def _described(attribute: str, leaves: Leaves) -> str:
    if attribute in leaves:
        return repr(leaves[attribute])
    below = [name.removeprefix(f"{attribute}.") for name in leaves if name.startswith(f"{attribute}.")]
    return f"with {listed(below)}" if below else "absent"
