"""How a stage ends on its ranks: the limits of time that it has, and what happened first, where."""

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dcpbench.core.mismatch import LimitReached, RankDeath
from dcpbench.core.rank_report import RankReport
from dcpbench.executors import stack_dumps
from dcpbench.executors.base import Outcome
from dcpbench.executors.rank_handle import Rank
from dcpbench.worker.messages import Failed

_DEATH_IS_SEEN_S = 0.25
"""How much later than its peers, whose connections break at once, the driver may see that a rank died."""
_CELL = "cell"
"""The phase that all of a stage counts as."""


def next_limit(limits: Mapping[str, float], began: float, ranks: Sequence[Rank]) -> tuple[float, str]:
    """When (`time.monotonic`) the first limit is reached if no rank gets any further, and of which phase.

    Args:
        limits: of each phase that has one, and of the whole `cell`, in seconds.
        began: when the stage did.
    """
    clocks = [(_CELL, began)]
    for rank in ranks:
        if rank.waiting:
            clocks += [(rank.phase, rank.since), *(("upload", since) for since in rank.uploads)]
    return min((since + limits[phase], phase) for phase, since in clocks if phase in limits)


@dataclass(frozen=True)
class RankEnd:
    """How a stage ended on one rank, as its host saw it. Plain data; times are `time.monotonic`.

    `where` says what it was at, in words; `ending` how its process ended, if it has; `frame` where the
    interpreter saw it die, `doing` where it hung. `gone_at` is when its process was seen to have ended,
    `aborted` that it ended itself.
    """

    number: int
    phase: str
    where: str
    late: bool = False
    waiting: bool = False
    alive: bool = True
    upload_under_way: bool = False
    report: RankReport | None = None
    failed: Failed | None = None
    gone_at: float | None = None
    aborted: bool = False
    ending: str = ""
    frame: str | None = None
    doing: str | None = None
    log_tail: tuple[str, ...] = ()


@dataclass(frozen=True)
class StageEnd:
    """How a stage ended on ranks: on those of a group that one host has, or on all.

    `limit` is the phase and the seconds of the limit that was reached, if one was; `dropped` tells of
    messages that were not about the stage.
    """

    ranks: tuple[RankEnd, ...]
    limit: tuple[str, float] | None = None
    dropped: tuple[str, ...] = ()

    @property
    def is_whole(self) -> bool:
        """Whether every rank reported."""
        return all(rank.report for rank in self.ranks)


def stage_end(ranks: Sequence[Rank], limit: tuple[str, float] | None, dumps: bool) -> StageEnd:
    """How a stage has ended on these ranks.

    Args:
        limit: the phase and the seconds of the limit that the ranks ran into, if nothing else went wrong.
        dumps: have ranks that hang write their stacks in that case, or without a limit.
    """
    dropped = tuple(told for rank in ranks for told in rank.dropped)
    if all(rank.report for rank in ranks):
        return StageEnd(tuple(map(_reported, ranks)), dropped=dropped)
    hang = dumps and not any(rank.failed or rank.gone_at is not None for rank in ranks)
    doing = stack_dumps.dump(ranks) if hang else {}
    phase = limit[0] if limit else _CELL
    ends = tuple(_end_of(rank, phase, doing.get(rank.number)) for rank in ranks)
    return StageEnd(ends, limit if hang else None, dropped)


def _reported(rank: Rank) -> RankEnd:
    return RankEnd(rank.number, rank.phase, rank.where(), report=rank.report)


def _end_of(rank: Rank, phase: str, doing: str | None) -> RankEnd:
    alive = rank.process.is_alive()
    return RankEnd(
        rank.number,
        rank.phase,
        rank.where(),
        late=rank.waiting and (phase == _CELL or rank.is_at(phase)),
        waiting=rank.waiting,
        alive=alive,
        upload_under_way=bool(rank.uploads),
        report=rank.report,
        failed=rank.failed,
        gone_at=rank.gone_at,
        aborted=rank.process.exitcode == -signal.SIGABRT,
        ending=rank.ending(),
        frame=stack_dumps.fatal(rank.log) if not alive else None,
        doing=doing,
        log_tail=tuple(stack_dumps.tail(rank.log)),
    )


def outcome_of(end: StageEnd) -> Outcome:
    """What a stage came to that ended so on all of its ranks."""
    reports = [rank.report for rank in end.ranks if rank.report is not None]
    if end.is_whole:
        return Outcome(reports, dropped=end.dropped)
    first = _first_cause(end.ranks)
    if first is None:
        return _timeout(end, reports)
    details = {
        "rank": first.number,
        "phase": first.phase,
        "upload_under_way": first.upload_under_way,
        "log_tail": list(first.log_tail),
    }
    if failed := first.failed:
        heard = [(rank, rank.failed) for rank in end.ranks if rank.failed]
        raised = tuple(one.error for rank, one in heard if rank is first or not one.secondary)
        before = [one.report for _, one in heard if one.report]
        details["phase"] = failed.error.phase
        return Outcome(
            reports,
            "error",
            failed.error,
            raised=raised,
            before=before,
            details=details,
            dropped=end.dropped,
        )
    death = RankDeath(first.number, first.phase, first.ending, first.upload_under_way, first.frame)
    return Outcome(reports, "crash", death, details=details, dropped=end.dropped)


def _first_cause(ranks: Sequence[RankEnd]) -> RankEnd | None:
    """The rank to which it happened first: one that raised or died by itself. What may be an echo
    of another's end counts only where there is nothing else."""
    causes = [(rank.failed.at, rank) for rank in ranks if rank.failed and not rank.failed.secondary]
    for rank in ranks:
        if rank.gone_at is not None:
            # A rank that aborts may have found a peer dead, so that one goes first.
            head_start_s = 0.0 if rank.aborted else _DEATH_IS_SEEN_S
            causes.append((rank.gone_at - head_start_s, rank))
    echoes = [(rank.failed.at, rank) for rank in ranks if rank.failed]
    if not causes and echoes:
        # It may have died after its own report, when nobody was listening any more.
        causes = [(0.0, rank) for rank in ranks if rank.report and not rank.alive]
    return min(causes or echoes, key=lambda cause: cause[0], default=(0.0, None))[1]


def _timeout(end: StageEnd, reports: list[RankReport]) -> Outcome:
    assert end.limit
    phase, limit_s = end.limit
    late = {rank.number: rank.where for rank in end.ranks if rank.late}
    others = {rank.number: rank.where for rank in end.ranks if rank.waiting and not rank.late}
    doing = {rank.number: rank.doing for rank in end.ranks if rank.doing}
    of_phase = None if phase == _CELL else phase
    reached = LimitReached(f"timeouts.{phase}_s", limit_s, of_phase, late, others, doing)
    details = {"limit": reached.key, "doing": {str(number): frame for number, frame in doing.items()}}
    return Outcome(reports, "timeout", reached, details=details, dropped=end.dropped)
