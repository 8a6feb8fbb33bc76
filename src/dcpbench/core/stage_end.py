"""How a stage of a cell ended on its ranks: what each reported, or what stopped it. Plain data that
whatever runs ranks hands over; only `dcpbench.verdict` judges it."""

from dataclasses import dataclass

from dcpbench.core.mismatch import RaisedError
from dcpbench.core.rank_report import RankReport

WHOLE_STAGE = "cell"
"""The name that all phases of a stage have together where limits of time are about phases."""


@dataclass(frozen=True)
class Failed:
    """A rank raised. `at` is `time.monotonic`, one clock for all processes of a host.

    `secondary` says that the error is the echo of what happened to a peer: a closed connection, or a
    failure that DCP passes on to every rank. `report` is what the rank had seen and measured until then.
    """

    at: float
    error: RaisedError
    secondary: bool
    report: RankReport | None = None


@dataclass
class RankEnd:
    """How a stage ended on one rank, as its host saw it; times are `time.monotonic`.

    Args:
        rank, local_rank, host: its numbers, in the world and on its host.
        phase: the phase that it began last.
        uploads: when each upload began that was still in flight.
        gone_at: when its process was seen to have ended.
        exit_status: of its process, as multiprocessing has it; None while that runs, or where nobody knows.
        lost: why nobody knows, in words.
        frame: where the interpreter saw it die, as after a segmentation fault.
        doing: where it hung, as far as that could be found out.
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
        """Whether it has yet to tell how the stage ended."""
        return self.report is None and self.failed is None and self.gone_at is None

    def is_in(self, phase: str) -> bool:
        """Whether it is in a phase; an upload may be in flight during another one."""
        return phase in (WHOLE_STAGE, self.phase) or (phase == "upload" and bool(self.uploads))


@dataclass(frozen=True)
class HostUsed:
    """A host that ranks of a stage ran on, and how far its clock was ahead of the driver's, in seconds, give
    or take `clock_error_s`."""

    name: str
    ranks: tuple[int, ...]
    clock_offset_s: float
    clock_error_s: float


@dataclass(frozen=True)
class StageEnd:
    """How a stage ended on all of its ranks, or on those of one host.

    Args:
        limit: the phase and the seconds of the limit of time that it reached, if it did.
        not_run: why no rank ran it; an error.
        skip: why no rank can run it; not an error.
        dropped: messages that came meanwhile and were about something else, as sentences.
        left: names of shared memory that may be the ranks' and was not removed.
        hosts: those that it ran on, where there may be several.
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
        """The reports of the ranks that came to its end."""
        return [rank.report for rank in self.ranks if rank.report]

    @property
    def observed(self) -> list[RankReport]:
        """The same, and what those that raised had reported until then."""
        return [*self.reports, *(one.failed.report for one in self.ranks if one.failed and one.failed.report)]

    @property
    def is_complete(self) -> bool:
        """Whether every rank reported."""
        return not self.not_run and not self.skip and all(rank.report for rank in self.ranks)

    @property
    def is_clean(self) -> bool:
        """Whether its ranks can run other stages: all reported, and none was changed by this one."""
        return self.is_complete and not any(report.left_behind for report in self.reports)
