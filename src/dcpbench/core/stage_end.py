"""The end of a stage on its ranks: what each reported, or what stopped it. Plain data from executors, which
judge nothing; `dcpbench.verdict` does."""

from dataclasses import dataclass

from dcpbench.core.mismatch import LimitReached, RaisedError
from dcpbench.core.rank_report import RankReport

WHOLE_STAGE = "cell"
"""The phase of a time limit that is about the complete stage."""


@dataclass(frozen=True)
class Failed:
    """Message of a rank that raised. `at` is `time.monotonic`, one clock for all processes of a host.

    `secondary` marks the echo of an error elsewhere: a closed connection, or a failure that DCP passes on to
    every rank. `report` has what the rank had compared and measured until then.
    """

    at: float
    error: RaisedError
    secondary: bool
    report: RankReport | None = None


@dataclass
class RankEnd:
    """The end of a stage on one rank, as its host observed it; times are `time.monotonic`.

    Args:
        rank, local_rank, host: its numbers, in the world and on its host.
        phase: the phase that it began last.
        uploads: when each upload began that was still in flight.
        gone_at: when its process was found to have ended.
        exit_status: `exitcode` of its process; None while that runs, or if it is unknown.
        lost: why it is unknown, as a predicate.
        frame: the innermost frame when the interpreter died, as after a segmentation fault.
        doing: the innermost frame when the rank hung, as a predicate.
    """

    rank: int
    local_rank: int
    host: str
    phase: str = "join"
    uploads: tuple[float, ...] = ()
    report: RankReport | None = None
    failed: Failed | None = None
    gone_at: float | None = None
    exit_status: int | None = None
    lost: str | None = None
    frame: str | None = None
    doing: str | None = None
    log_tail: tuple[str, ...] = ()

    @property
    def waiting(self) -> bool:
        """Whether the stage has not ended on this rank."""
        return self.report is None and self.failed is None and self.gone_at is None

    def is_in(self, phase: str) -> bool:
        """Whether it is in a phase. An upload may be in flight during another phase."""
        return phase in (WHOLE_STAGE, self.phase) or (phase == "upload" and bool(self.uploads))


Cause = RaisedError | RankEnd | LimitReached
"""Cause of a stage's end where not every rank reported; a RankEnd is a rank that died."""


@dataclass(frozen=True)
class HostUsed:
    """A host that ran ranks of a stage, and the offset of its clock from the driver's, accurate to
    `clock_error_s`."""

    name: str
    ranks: tuple[int, ...]
    clock_offset_s: float
    clock_error_s: float


@dataclass(frozen=True)
class StageEnd:
    """The end of a stage on all of its ranks, or on those of one host.

    Args:
        limit: phase and seconds of the time limit that it exceeded, if any.
        not_run: why no rank ran it, where that is an error.
        skip: why no rank can run it, where that is not an error.
        dropped: sentences about messages that belonged to other stages.
        left: names of shared memory that may belong to its ranks and was not removed.
        hosts: the hosts that ran it, where there may be several.
    """

    ranks: tuple[RankEnd, ...] = ()
    limit: tuple[str, float] | None = None
    not_run: str | None = None
    skip: str | None = None
    dropped: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    hosts: tuple[HostUsed, ...] = ()

    @property
    def reports(self) -> list[RankReport]:
        """Reports of the ranks that completed the stage."""
        return [rank.report for rank in self.ranks if rank.report]

    @property
    def observed(self) -> list[RankReport]:
        """The same, and unfinished reports of ranks that raised."""
        return [*self.reports, *(one.failed.report for one in self.ranks if one.failed and one.failed.report)]

    @property
    def is_complete(self) -> bool:
        """Whether every rank reported."""
        return not self.not_run and not self.skip and all(rank.report for rank in self.ranks)

    @property
    def is_clean(self) -> bool:
        """Whether its ranks can be reused: all reported, and the stage leaked nothing into any."""
        return self.is_complete and not any(report.left_behind for report in self.reports)
