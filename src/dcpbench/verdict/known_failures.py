"""Matches the failures of a cell with the failures that are known for it."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from omegaconf import MISSING
from packaging.specifiers import SpecifierSet

from dcpbench.core.checks import CHECKS
from dcpbench.core.mismatch import Mismatch, RaisedError
from dcpbench.core.sentences import mismatch_sentence
from dcpbench.verdict.sentences import cause_sentence, known_sentence, unlisted_sentence
from dcpbench.verdict.verdict import KNOWN, UNEXPLAINED, Verdict


@dataclass
class KnownError:
    """An exception that a rank raises.

    >>> KnownError("KeyError", ["load"], "'net.*'").matches(RaisedError(0, "load", "KeyError", "'net1'"))
    True

    Args:
        type: a regular expression for the name of its class.
        phases: the phases in which it is known.
        message: a regular expression for its full text.
        by: a defect that a plug-in recomputes, which must raise exactly this.
        in_torch: True if torch must raise it, not code that torch calls. So it is for every error that passes
            through a user's code, unless `code` is set.
        of: what the model or the optimizer must be: regular expressions, each for one of `RaisedError.of`.
        each: a regular expression: wherever it matches in the text, its group must be one of these, too.
        code: a regular expression for the user's line of code that it comes from, empty if there is none.
    """

    type: str = MISSING
    phases: list[str] = MISSING
    message: str = ".*"
    by: str | None = None
    in_torch: bool = False
    of: list[str] = field(default_factory=list)
    each: str | None = None
    code: str | None = None

    @property
    def patterns(self) -> list[str]:
        """All of its regular expressions."""
        return [self.type, self.message, self.code or "", self.each or "", *self.of]

    def matches(self, error: RaisedError) -> bool:
        """Return whether a rank's exception is this one."""
        same = error.phase in self.phases and self.by in (None, error.by)
        same = same and re.fullmatch(self.type, error.type) is not None
        if self.code is not None:
            same = same and re.fullmatch(self.code, error.code or "") is not None
        must_be_in_torch = self.in_torch or (self.code is None and error.code is not None)
        same = same and (error.in_torch or not must_be_in_torch)
        same = same and all(any(re.fullmatch(pattern, name) for name in error.of) for pattern in self.of)
        same = same and not (self.each and {*re.findall(self.each, error.message)} - {*error.of})
        return same and re.fullmatch(self.message, error.message) is not None


@dataclass
class KnownMismatch:
    """A mismatch that is known.

    >>> from dcpbench.core.mismatch import Problem
    >>> KnownMismatch("state.*", ["missing"]).matches(Mismatch("state.step", Problem.missing))
    True

    Args:
        name: a regular expression for its full name.
        problems: the problems that are known.
        by: the defect that must produce exactly this state, recomputed by a plug-in (`Plugin.defects`);
            `checkpoint` if the checkpoint must contain it; `second_derivatives` if the step must have them
            under `fully_shard`. Without the plug-in the entry is not used.
        within: largest difference, as a fraction of the largest magnitude in the tensor, or of the loss.
        moments: those of its place (`checkpoint`), which must have no `how`; by default any place.
    """

    name: str = MISSING
    problems: list[str] = MISSING
    by: str | None = None
    within: float | None = None
    moments: list[str] = field(default_factory=list)

    def matches(self, mismatch: Mismatch) -> bool:
        """Return whether a mismatch is this one, within its limit."""
        share = mismatch.facts.get("share")
        return (
            re.fullmatch(self.name, mismatch.name) is not None
            and mismatch.problem in self.problems
            and (not self.moments or (mismatch.where.moment in self.moments and not mismatch.where.how))
            and self.by in (None, mismatch.by)
            and (self.within is None or (share is not None and share <= self.within))
        )


@dataclass
class KnownFailure:
    """An entry of the list of known failures: the cells and versions of torch, what fails, and why.

    >>> KnownFailure("my-id", {"parallel": "ddp"}, ">=2.11", reason="torch drops it").always
    True

    Args:
        cells: columns of the row, or keys of its configuration, with the value or values that they must have.
            `load_world_size` is the number of ranks that load, even if the cell does not set it.
        torch, load_torch: version specifiers such as `>=2.11,<2.15`, for torch and that of `load_python`.
        checks: by check, the mismatches that are known. At least one of all must occur.
        error: an exception that ranks raise, if no other mismatch than those listed in `checks`, of this or
            another entry for the cell, occurred before.
        always: False for a failure that depends on the order of threads, so that the cell can also pass.
        status: of the row, `xfail`, or `skip` for a documented refusal of torch.
        reason: why it fails, and for a `skip` what to do.
    """

    id: str = MISSING
    cells: dict[str, Any] = field(default_factory=dict)
    torch: str = MISSING
    load_torch: str | None = None
    checks: dict[str, list[KnownMismatch]] = field(default_factory=dict)
    error: KnownError | None = None
    always: bool = True
    status: str = "xfail"
    reason: str = MISSING
    link: str | None = None

    @property
    def recomputations(self) -> set[str]:
        """Names of the defects that must produce the state or raise the exception that it lists."""
        every = [*(error for listed in self.checks.values() for error in listed), self.error]
        return {known.by for known in every if known and known.by}

    def covers(self, cell: Mapping[str, Any]) -> bool:
        """Return whether this failure is known for the cell and the torch of a row with these columns."""
        for column, wanted in self.cells.items():
            value = cell[column] if column in cell else cell["config"].get(column)
            if value not in (wanted if isinstance(wanted, list) else [wanted]):
                return False
        needed = [(self.torch, cell["torch_version"] or "0")]
        needed += [(self.load_torch, cell.get("load_torch_version"))] if self.load_torch else []
        return all(version and SpecifierSet(of).contains(version, prereleases=True) for of, version in needed)

    def explains(self, check: str, mismatch: Mismatch) -> bool:
        """Return whether it lists a mismatch of a check."""
        return any(known.matches(mismatch) for known in self.checks.get(check, ()))


class Explanation(NamedTuple):
    """The known failures that occurred (`by`), and the mismatches (each with its check) and errors that are
    not known."""

    by: list[KnownFailure]
    mismatches: list[tuple[str, Mismatch]]
    raised: list[RaisedError]

    @property
    def is_complete(self) -> bool:
        """True if the known failures list everything that failed."""
        return bool(self.by) and not self.mismatches and not self.raised


def explaining(
    known: Sequence[KnownFailure], failed: Mapping[str, Iterable[Mismatch]], raised: Sequence[RaisedError]
) -> Explanation:
    """Return which of the mismatches and errors of a cell are known.

    Args:
        known: the failures that are listed for the cell. One with an error counts only if a rank raised it.
        failed: the mismatches of all ranks, by check.
        raised: the errors of all ranks, each of which must be listed.
    """
    mismatches = [(check, mismatch) for check, of_check in failed.items() for mismatch in of_check]

    def raises(failure: KnownFailure, error: RaisedError) -> bool:
        return failure.error is not None and failure.error.matches(error)

    by_error = [next((failure for failure in known if raises(failure, error)), None) for error in raised]
    candidates = [
        failure for failure in known if not failure.error or any(raises(failure, error) for error in raised)
    ]
    by_mismatch = [
        next((failure for failure in candidates if failure.explains(*mismatch)), None)
        for mismatch in mismatches
    ]
    return Explanation(
        [failure for failure in known if any(failure is used for used in (*by_mismatch, *by_error))],
        [mismatch for mismatch, failure in zip(mismatches, by_mismatch, strict=True) if failure is None],
        [error for error, failure in zip(raised, by_error, strict=True) if failure is None],
    )


def with_known_failures(known: Sequence[KnownFailure], verdict: Verdict) -> Verdict:
    """Return `xfail` or `skip` for a cell that failed as listed, `xpass` for one that is listed but passed.

    A cell with a check that could not have failed is still `vacuous`. A cell with a mismatch or error that is
    not listed keeps its status, and its reason names that first.
    """
    missed = [failure for failure in known if failure.always] if verdict.status == "pass" else []
    if missed:
        reason = f"known failure {missed[0].id} did not happen ({missed[0].reason})"
        return replace(verdict, status="xpass", reason=reason)
    if verdict.status not in ("fail", "error"):
        return verdict
    explanation = explaining(
        known, {check.check: check.mismatches for check in verdict.failed}, verdict.raised
    )
    if not explanation.by:
        return verdict
    if not explanation.is_complete:
        unlisted = [f"{check}: {mismatch_sentence(mismatch)}" for check, mismatch in explanation.mismatches]
        unlisted += [cause_sentence(error) for error in explanation.raised]
        checks = [*dict.fromkeys(check for check, _ in explanation.mismatches)]
        trains = not explanation.raised and all(CHECKS[check].training for check in checks)
        reason = unlisted_sentence(
            [failure.id for failure in explanation.by], unlisted, str(verdict.reason), trains
        )
        return replace(verdict, reason=reason, details={**verdict.details, UNEXPLAINED: checks})
    listed = [(failure.id, failure.reason, failure.link) for failure in explanation.by]
    reason = known_sentence(listed, str(verdict.reason))
    if {failure.status for failure in explanation.by} == {"skip"}:
        return replace(verdict, status="skip", reason=reason)
    if verdict.gaps:
        return replace(verdict, status="vacuous", reason=f"{'; '.join(verdict.gaps)} ({reason})")
    details = {**verdict.details, KNOWN: [[*failure] for failure in dict.fromkeys(listed)]}
    return replace(verdict, status="xfail", reason=reason, details=details)
