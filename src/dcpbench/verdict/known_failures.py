"""Matches failures with those that are known for a cell: they are expected, and nothing else is."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from omegaconf import MISSING
from packaging.specifiers import SpecifierSet

from dcpbench.core.mismatch import Mismatch, RaisedError
from dcpbench.core.sentences import mismatch_sentence
from dcpbench.verdict.sentences import beside_known_sentence, cause_sentence, known_sentence
from dcpbench.verdict.verdict import Verdict


@dataclass
class KnownError:
    """An exception that a rank raises: its class, its phases, and a regular expression for its complete text,
    which is torch's."""

    type: str = MISSING
    phases: list[str] = MISSING
    message: str = ".*"

    def matches(self, error: RaisedError) -> bool:
        """Return whether a rank raised this."""
        alike = error.type == self.type and error.phase in self.phases
        return alike and re.fullmatch(self.message, error.message) is not None


@dataclass
class KnownMismatch:
    """A mismatch that is known.

    Args:
        name: a regular expression for its complete name.
        problems: the kinds of mismatch that are known.
        by: the defect which must make exactly this of the state, recomputed by a plug-in (`Plugin.defects`),
            or `checkpoint`, which must hold it. Where no plug-in recomputes it, the whole entry is idle.
        within: the largest distance, as a part of the largest magnitude in the tensor, or of the loss.
        where: a regular expression for its complete place (`in the checkpoint of step 4`).
    """

    name: str = MISSING
    problems: list[str] = MISSING
    by: str | None = None
    within: float | None = None
    where: str = ".*"

    def matches(self, finding: Mismatch) -> bool:
        """Return whether this is the mismatch, in kind and in size."""
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

    @property
    def recomputations(self) -> set[str]:
        """The defects that must make what it lists of the state."""
        return {one.by for listed in self.checks.values() for one in listed if one.by}

    def covers(self, cell: Mapping[str, Any]) -> bool:
        """Return whether this failure is known for the cell and the torch of a row with these columns."""
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
        """Return whether it lists a mismatch that a check found."""
        return any(mismatch.matches(finding) for mismatch in self.checks.get(check, ()))


class Explanation(NamedTuple):
    """The known failures by which a cell failed, and mismatches (by check) and errors in addition to them."""

    by: list[KnownFailure]
    found: list[tuple[str, Mismatch]]
    raised: list[RaisedError]

    @property
    def whole(self) -> bool:
        """Whether they list together everything by which it failed."""
        return bool(self.by) and not self.found and not self.raised


def explaining(
    known: Sequence[KnownFailure], failed: Mapping[str, Iterable[Mismatch]], raised: Sequence[RaisedError]
) -> Explanation:
    """Return which of the mismatches and errors of a cell are known.

    Args:
        known: failures listed for the cell; one with an error counts only if a rank raised that.
        failed: mismatches of all ranks, by check.
        raised: errors of all ranks, each of which must be listed.
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


def with_known_failures(known: Sequence[KnownFailure], verdict: Verdict) -> Verdict:
    """Return `xfail` for a cell that failed as listed, `xpass` for one that passed though it is listed.

    A cell with a check that was not able to fail is `vacuous` all the same. One with any mismatch or error
    that is not listed keeps its status, and its reason names that first.
    """
    missed = [failure for failure in known if failure.always] if verdict.status == "pass" else []
    if missed:
        reason = f"known failure {missed[0].id} did not happen ({missed[0].reason})"
        return replace(verdict, status="xpass", reason=reason)
    failed = {one.check: one.mismatches for one in verdict.failed}
    if verdict.status not in ("fail", "error"):
        return verdict
    explanation = explaining(known, failed, verdict.raised)
    if not explanation.by:
        return verdict
    if not explanation.whole:
        beside = [f"{check}: {mismatch_sentence(mismatch)}" for check, mismatch in explanation.found]
        beside += [cause_sentence(error) for error in explanation.raised]
        reason = beside_known_sentence([one.id for one in explanation.by], beside, str(verdict.reason))
        return replace(verdict, reason=reason)
    listed = [(one.id, one.reason, one.link) for one in explanation.by]
    reason = known_sentence(listed, str(verdict.reason))
    if verdict.powerless:
        return replace(verdict, status="vacuous", reason=f"{'; '.join(verdict.powerless)} ({reason})")
    return replace(verdict, status="xfail", reason=reason)
