"""The verdict: the status of an attempt at a cell, with its reason."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dcpbench.core.mismatch import Mismatch, RaisedError
from dcpbench.core.sentences import rank_sentence
from dcpbench.verdict.sentences import check_sentence

UNEXPLAINED, KNOWN, OUTSIDE = "unexplained", "known_failures", "outside"
"""Keys of `Verdict.details`: the checks with mismatches that no known failure explains, if others are; the
id, reason and link of each known failure of an `xfail`; and what outside the cell made it fail."""


class FailedCheck(NamedTuple):
    """A check that failed.

    >>> from dcpbench.core.mismatch import Problem
    >>> lr = Mismatch("lr", Problem.missing)
    >>> FailedCheck("optim_equal", 1, lr, (lr,)).sentence
    'optim_equal: rank 1: lr: saved, but not restored'

    Args:
        rank: the rank of the first mismatch.
        first: the first mismatch.
        mismatches: the mismatches of all ranks.
        place: the rank's place, if there are several hosts.
    """

    check: str
    rank: int
    first: Mismatch
    mismatches: tuple[Mismatch, ...]
    place: str | None = None

    @property
    def on_rank(self) -> str:
        """The rank as text."""
        return rank_sentence(self.rank, self.place)

    @property
    def names(self) -> list[str]:
        """Names of everything that differs."""
        return list(dict.fromkeys(mismatch.name for mismatch in self.mismatches))

    @property
    def sentence(self) -> str:
        """A sentence that explains the failure."""
        return check_sentence(self.check, self.on_rank, self.first, self.names)


@dataclass(frozen=True)
class Verdict:
    """The outcome of an attempt at a cell. Most fields are columns of the row.

    >>> Verdict("skip", "needs 4 GPUs").checks
    {}

    Args:
        checks: by name, True or False; None for a check that did not apply.
        failed: the checks that failed, for known failures and faults to match.
        error: the first exception, if the attempt ended with one.
        raised: the exceptions of all ranks.
        gaps: sentences about checks that could not have failed.
        powered: True if there are no `gaps`.
        resume, training: True if all checks of saving and resuming, or of training, passed and could have
            failed; None if there were none.
        fault_seen: whether the injected fault was detected as expected; None without a fault.
    """

    status: str
    reason: str | None = None
    checks: dict[str, bool | None] = field(default_factory=dict)
    failed: tuple[FailedCheck, ...] = ()
    error: RaisedError | None = None
    raised: tuple[RaisedError, ...] = ()
    gaps: tuple[str, ...] = ()
    powered: bool | None = None
    resume: bool | None = None
    training: bool | None = None
    max_abs_diff: float | None = None
    first_mismatch: str | None = None
    fault_seen: bool | None = None
    details: dict[str, Any] = field(default_factory=dict)
