"""Known failures: those listed for a cell are expected, and nothing else."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from omegaconf import MISSING
from packaging.specifiers import SpecifierSet

from dcpbench.core.mismatch import Mismatch, RaisedError


@dataclass
class KnownError:
    """An exception that a rank raises: in which phases, of which class, and a regular expression for its
    whole text, which is torch's own."""

    type: str = MISSING
    phases: list[str] = MISSING
    message: str = ".*"

    def matches(self, error: RaisedError) -> bool:
        """Whether this is what a rank raised."""
        alike = error.type == self.type and error.phase in self.phases
        return alike and re.fullmatch(self.message, error.message) is not None


@dataclass
class KnownMismatch:
    """What of a check is known to be wrong.

    Args:
        name: a regular expression for the whole name of what differs.
        problems: the kinds of mismatch that are known of it.
        by: the defect of `dcpbench.verify.known_defects` which must make exactly this of the state, or
            `checkpoint`, which must hold it.
        within: the largest distance, as a part of the largest magnitude in the tensor, or of the loss.
        where: a regular expression for the whole of where it is seen (`in the checkpoint of step 4`).
    """

    name: str = MISSING
    problems: list[str] = MISSING
    by: str | None = None
    within: float | None = None
    where: str = ".*"

    def matches(self, finding: Mismatch) -> bool:
        """Whether this is what is wrong with a piece of state, in kind and in magnitude."""
        share = finding.facts.get("share")
        return (
            re.fullmatch(self.name, finding.name) is not None
            and finding.problem in self.problems
            and re.fullmatch(self.where, finding.where) is not None
            and self.by in (None, finding.by)
            and (self.within is None or (share is not None and share <= self.within))
        )


@dataclass
class KnownFailure:
    """One finding: in which cells, under which torch, what fails, and where it is explained.

    `cells` maps columns of the row, or keys of its configuration, to the value or values they must have;
    `load_world_size` is there how many ranks load, also where the cell leaves it to `world_size`. `torch` is
    a version specifier such as `>=2.11,<2.15`, `load_torch` one of the torch of `load_python`. `checks` lists
    for each check that may fail what of it is known to be wrong. Not all of it need be, but something must.
    With an `error`, ranks raise it, after nothing but what `checks` lists, here or of another entry for the
    cell, was found. One that does not happen `always`, as it depends on which thread comes first, may also
    pass.
    """

    id: str = MISSING
    cells: dict[str, Any] = field(default_factory=dict)
    torch: str = MISSING
    load_torch: str | None = None
    checks: dict[str, list[KnownMismatch]] = field(default_factory=dict)
    error: KnownError | None = None
    always: bool = True
    reason: str = MISSING
    link: str | None = None

    def covers(self, cell: Mapping[str, Any]) -> bool:
        """Whether the columns of a row are of a cell, on a torch, that this failure is known for."""
        for column, wanted in self.cells.items():
            value = cell[column] if column in cell else cell["config"].get(column)
            if value not in (wanted if isinstance(wanted, list) else [wanted]):
                return False
        needed = [(self.torch, cell["torch_version"] or "0")]
        if self.load_torch:
            if cell.get("load_torch_version") is None:
                return False
            needed.append((self.load_torch, cell["load_torch_version"]))
        return all(SpecifierSet(of).contains(version, prereleases=True) for of, version in needed)

    def explains(self, check: str, finding: Mismatch) -> bool:
        """Whether it lists what a check found."""
        return any(mismatch.matches(finding) for mismatch in self.checks.get(check, ()))


class Explanation(NamedTuple):
    """By which known failures a cell failed, and what it found (by which check) or raised beside them."""

    by: list[KnownFailure]
    found: list[tuple[str, Mismatch]]
    raised: list[RaisedError]

    @property
    def whole(self) -> bool:
        """Whether it failed in no way but what they list together."""
        return bool(self.by) and not self.found and not self.raised


def explaining(
    known: Sequence[KnownFailure], failed: Mapping[str, Iterable[Mismatch]], raised: Sequence[RaisedError]
) -> Explanation:
    """How much of why a cell failed is known.

    Args:
        known: what is listed for the cell; with an error only where a rank raised that.
        failed: what every rank found, by the check that did not hold.
        raised: what every rank raised, of which each must be listed.
    """
    errors = [
        (one, failure) for one in raised for failure in known if failure.error and failure.error.matches(one)
    ]
    may = [failure for failure in known if not failure.error or any(failure is one for _, one in errors)]
    found = [(check, finding) for check, findings in failed.items() for finding in findings]
    of_found = [next((one for one in may if one.explains(*each)), None) for each in found]
    of_raised = [next((failure for one, failure in errors if one is error), None) for error in raised]
    return Explanation(
        [failure for failure in known if any(failure is one for one in (*of_found, *of_raised))],
        [each for each, one in zip(found, of_found, strict=True) if one is None],
        [error for error, one in zip(raised, of_raised, strict=True) if one is None],
    )
