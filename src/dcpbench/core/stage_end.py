"""The end of a stage: the report of each rank, or what stopped it. Plain data from executors, which
`dcpbench.verdict` judges."""

from dataclasses import dataclass

from dcpbench.core.mismatch import LimitReached, RaisedError
from dcpbench.core.rank_report import RankReport

WHOLE_STAGE = "cell"
"""Phase of a time limit that applies to the complete stage."""


@dataclass(frozen=True)
class Failed:
    """The message of a rank that raised.

    >>> Failed(12.5, RaisedError(1, "load", "KeyError", "'lr'"), secondary=False).error.type
    'KeyError'

    Args:
        at: `time.monotonic`, which is the same clock for all processes of a host.
        secondary: True for a consequence of an error elsewhere: a closed connection, or a failure that DCP
            passes on to every rank.
        report: the comparisons and measurements that the rank made before it raised.
    """

    at: float
    error: RaisedError
    secondary: bool
    report: RankReport | None = None


@dataclass
class RankEnd:
    """The end of a stage on one rank, as its host observed it. Times are `time.monotonic`.

    >>> RankEnd(1, 1, "here", phase="save", exited_at=12.5, exit_status=-9).waiting
    False

    Args:
        rank, local_rank: its number in the world and on its host.
        phase: the phase that it started last.
        uploads: start times of the uploads that were in flight.
        exited_at: when its process was found to have exited.
        exit_status: `exitcode` of its process; None if the process is running or the status is unknown.
        lost: why the status is unknown, as a predicate.
        frame: the innermost frame if the interpreter died, as after a segmentation fault.
        doing: the innermost frame if the rank hung, as a predicate.
    """

    rank: int
    local_rank: int
    host: str
    phase: str = "join"
    uploads: tuple[float, ...] = ()
    report: RankReport | None = None
    failed: Failed | None = None
    exited_at: float | None = None
    exit_status: int | None = None
    lost: str | None = None
    frame: str | None = None
    doing: str | None = None
    log_tail: tuple[str, ...] = ()

    @property
    def waiting(self) -> bool:
        """True if the stage has not ended on this rank."""
        return self.report is None and self.failed is None and self.exited_at is None

    def is_in(self, phase: str) -> bool:
        """Return whether it is in a phase. An upload can be in flight during any other phase."""
        return phase in (WHOLE_STAGE, self.phase) or (phase == "upload" and bool(self.uploads))


Cause = RaisedError | RankEnd | LimitReached
"""The cause if not every rank reported; a `RankEnd` is a rank that died."""


@dataclass(frozen=True)
class HostUsed:
    """A host that ran ranks of a stage. `clock_offset_s` is the offset of its clock from the driver's,
    accurate to `clock_error_s`."""

    name: str
    ranks: tuple[int, ...]
    clock_offset_s: float
    clock_error_s: float


@dataclass(frozen=True)
class StageEnd:
    """The end of a stage on all of its ranks, or on the ranks of one host.

    >>> died = RankEnd(1, 1, "here", phase="save", exited_at=12.5, exit_status=-9)
    >>> end = StageEnd((RankEnd(0, 0, "here", report=RankReport(0)), died))
    >>> end.is_complete, len(end.reports)
    (False, 1)

    Args:
        limit: phase and seconds of the time limit that it exceeded, if any.
        not_run: why no rank ran it, if that is an error.
        skip: why no rank can run it, if that is not an error.
        dropped: sentences about messages of other stages that were ignored.
        unremoved_memory: names of shared memory that might belong to its ranks and was not removed.
        hosts: the hosts that ran it, if there can be several.
    """

    ranks: tuple[RankEnd, ...] = ()
    limit: tuple[str, float] | None = None
    not_run: str | None = None
    skip: str | None = None
    dropped: tuple[str, ...] = ()
    unremoved_memory: tuple[str, ...] = ()
    hosts: tuple[HostUsed, ...] = ()

    @property
    def reports(self) -> list[RankReport]:
        """The reports of the ranks that completed the stage."""
        return [rank.report for rank in self.ranks if rank.report]

    @property
    def observed(self) -> list[RankReport]:
        """The same, and the unfinished reports of ranks that raised."""
        return [
            *self.reports,
            *(rank.failed.report for rank in self.ranks if rank.failed and rank.failed.report),
        ]

    @property
    def is_complete(self) -> bool:
        """True if every rank reported."""
        return not self.not_run and not self.skip and all(rank.report for rank in self.ranks)

    @property
    def is_clean(self) -> bool:
        """True if its ranks can be reused: all reported, and the stage leaked nothing into any of them."""
        return self.is_complete and not any(report.texts("left_behind") for report in self.reports)
