"""The verdict: one status of an attempt at a cell, with its reason."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dcpbench.core.mismatch import Mismatch, RaisedError
from dcpbench.core.sentences import rank_sentence
from dcpbench.verdict.sentences import check_sentence


class FailedCheck(NamedTuple):
    """A check that did not hold: its first mismatch and the rank of that, the mismatches of all ranks, and
    the rank's place if there are several hosts."""

    check: str
    rank: int
    first: Mismatch
    mismatches: tuple[Mismatch, ...]
    place: str | None = None

    @property
    def on_rank(self) -> str:
        """The rank, in words."""
        return rank_sentence(self.rank, self.place)

    @property
    def names(self) -> list[str]:
        """Names of everything that differs."""
        return list(dict.fromkeys(mismatch.name for mismatch in self.mismatches))

    @property
    def sentence(self) -> str:
        """A sentence that says why it did not hold."""
        return check_sentence(self.check, self.on_rank, self.first, self.names)


@dataclass(frozen=True)
class Verdict:
    """The outcome of an attempt at a cell, as columns of its row.

    `failed`, `error` and what all ranks `raised` are matched with known failures and faults. `powerless`
    tells which checks could not have failed.
    """

    status: str
    reason: str | None = None
    checks: dict[str, bool | None] = field(default_factory=dict)
    failed: tuple[FailedCheck, ...] = ()
    error: RaisedError | None = None
    raised: tuple[RaisedError, ...] = ()
    powerless: tuple[str, ...] = ()
    powered: bool | None = None
    resume: bool | None = None
    training: bool | None = None
    max_abs_diff: float | None = None
    first_mismatch: str | None = None
    fault_seen: bool | None = None
    details: dict[str, Any] = field(default_factory=dict)
