"""Finds why a stage did not end as expected: the first thing that went wrong, and its rank."""

import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dcpbench.core.mismatch import LimitReached, RaisedError
from dcpbench.core.sentences import place_sentence
from dcpbench.core.stage_end import WHOLE_STAGE, Cause, RankEnd, StageEnd
from dcpbench.verdict.sentences import phase_sentence

_DEATH_IS_NOTICED_S = 0.25
"""The driver can notice a death this much later than peers, whose connections break at once."""


@dataclass(frozen=True)
class StageStop:
    """The reason why a stage did not end as expected.

    >>> stop_of(StageEnd(not_run="no host is free")).problem
    'no host is free'

    Args:
        cause: what happened first; if None, `problem` is a sentence about it.
        place: the place of the cause's rank, if there can be several hosts.
        raised: the exceptions of all ranks that are not consequences of another rank's end.
        details: for the row's details.
    """

    status: str
    cause: Cause | None = None
    problem: str | None = None
    place: str | None = None
    raised: tuple[RaisedError, ...] = ()
    details: dict[str, Any] = field(default_factory=dict)


def stop_of(end: StageEnd, dies: str | None = None) -> StageStop | None:
    """Return why a stage did not end as expected; None if it did.

    Args:
        dies: the stage's function, if a rank has to die in it.
    """
    if end.skip or end.not_run:
        return StageStop("skip" if end.skip else "error", problem=end.skip or end.not_run)
    if end.is_complete:
        return StageStop("error", problem=f"expected a rank to die in {dies}, but none did") if dies else None
    first = _first_cause(end.ranks)
    if first is None:
        return _timeout(end)
    details: dict[str, Any] = {
        "rank": first.rank,
        "phase": first.failed.error.phase if first.failed else first.phase,
        "upload_under_way": bool(first.uploads),
        "log_tail": list(first.log_tail),
    }
    place = None
    if end.hosts:
        details |= {"host": first.host, "local_rank": first.local_rank}
        place = place_sentence(first.local_rank, first.host)
    if first.failed:
        error = first.failed.error
        details |= {"code": error.code, "in_torch": error.in_torch, "of": [*error.of]}
        raised = tuple(
            rank.failed.error
            for rank in end.ranks
            if rank.failed and (rank is first or not rank.failed.secondary)
        )
        return StageStop("error", error, place=place, raised=raised, details=details)
    return None if dies else StageStop("crash", first, place=place, details=details)


def _first_cause(ranks: Sequence[RankEnd]) -> RankEnd | None:
    """Return the first rank that raised or died. A consequence of another rank's end counts only if there is
    nothing else."""
    causes = [(rank.failed.at, rank) for rank in ranks if rank.failed and not rank.failed.secondary]
    for rank in ranks:
        if rank.exited_at is not None:
            # A rank that aborted may have done so because a peer died, so the peer goes first.
            head_start_s = 0.0 if rank.exit_status == -signal.SIGABRT else _DEATH_IS_NOTICED_S
            causes.append((rank.exited_at - head_start_s, rank))
    consequences = [(rank.failed.at, rank) for rank in ranks if rank.failed]
    if not causes and consequences:
        # A rank may have died after its report, when the driver no longer listened to it.
        causes = [(0.0, rank) for rank in ranks if rank.report and rank.exit_status is not None]
    return min(causes or consequences, key=lambda cause: cause[0], default=(0.0, None))[1]


def _timeout(end: StageEnd) -> StageStop:
    assert end.limit
    phase, limit_s = end.limit
    waiting = [rank for rank in end.ranks if rank.waiting]
    late = [rank for rank in waiting if rank.is_in(phase)]
    reached = LimitReached(
        f"timeouts.{phase}_s",
        limit_s,
        None if phase == WHOLE_STAGE else phase,
        late=_phases(late),
        others=_phases([rank for rank in waiting if rank not in late]),
        doing={rank.rank: rank.doing for rank in end.ranks if rank.doing},
        hosts={rank.rank: rank.host for rank in late if end.hosts},
    )
    doing = {str(rank): frame for rank, frame in reached.doing.items()}
    return StageStop("timeout", reached, details={"limit": reached.key, "doing": doing})


def _phases(ranks: Sequence[RankEnd]) -> dict[int, str]:
    return {rank.rank: phase_sentence(rank) for rank in ranks}
