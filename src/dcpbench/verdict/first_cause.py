"""Finds out why a stage of a cell did not end as expected: what happened first, and on which rank."""

import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dcpbench.core.mismatch import LimitReached, RaisedError
from dcpbench.core.sentences import place_sentence
from dcpbench.core.stage_end import WHOLE_STAGE, Cause, RankEnd, StageEnd
from dcpbench.verdict.sentences import phase_sentence

_DEATH_IS_SEEN_S = 0.25
"""How much later than its peers, whose connections break at once, the driver may see that a rank died."""


@dataclass(frozen=True)
class Stop:
    """Reason why a stage did not end as expected: a status, and the cause, or a sentence where there is none.

    `place` is where the cause's rank is, if there may be several hosts. `raised` has the errors of all ranks
    that raised by themselves. `details` are for the row.
    """

    status: str
    cause: Cause | None = None
    problem: str | None = None
    place: str | None = None
    raised: tuple[RaisedError, ...] = ()
    details: dict[str, Any] = field(default_factory=dict)


def stop_of(end: StageEnd, dies: str | None = None) -> Stop | None:
    """Return why a stage did not end as expected; None if it did.

    Args:
        dies: the function of a stage in which a rank has to die.
    """
    if end.skip or end.not_run:
        return Stop("skip" if end.skip else "error", problem=end.skip or end.not_run)
    if end.is_complete:
        return Stop("error", problem=f"a rank was to die in {dies}, and none did") if dies else None
    first = _first_cause(end.ranks)
    if first is None:
        return _timeout(end)
    details: dict[str, Any] = {
        "rank": first.rank,
        "phase": first.phase,
        "upload_under_way": bool(first.uploads),
        "log_tail": list(first.log_tail),
    }
    place = None
    if end.hosts:
        details |= {"host": first.host, "local_rank": first.local_rank}
        place = place_sentence(first.local_rank, first.host)
    if first.failed:
        raised = tuple(
            rank.failed.error
            for rank in end.ranks
            if rank.failed and (rank is first or not rank.failed.secondary)
        )
        details["phase"] = first.failed.error.phase
        return Stop("error", first.failed.error, place=place, raised=raised, details=details)
    return None if dies else Stop("crash", first, place=place, details=details)


def _first_cause(ranks: Sequence[RankEnd]) -> RankEnd | None:
    """Return the first rank that raised or died by itself. Echoes of another rank's end count only if there
    is nothing else."""
    causes = [(rank.failed.at, rank) for rank in ranks if rank.failed and not rank.failed.secondary]
    for rank in ranks:
        if rank.gone_at is not None:
            # A rank that aborts may have found a peer dead, so that one goes first.
            head_start_s = 0.0 if rank.exit_status == -signal.SIGABRT else _DEATH_IS_SEEN_S
            causes.append((rank.gone_at - head_start_s, rank))
    echoes = [(rank.failed.at, rank) for rank in ranks if rank.failed]
    if not causes and echoes:
        # It may have died after its own report, when nobody listened any longer.
        causes = [(0.0, rank) for rank in ranks if rank.report and rank.exit_status is not None]
    return min(causes or echoes, key=lambda cause: cause[0], default=(0.0, None))[1]


def _timeout(end: StageEnd) -> Stop:
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
    return Stop("timeout", reached, details={"limit": reached.key, "doing": doing})


def _phases(ranks: Sequence[RankEnd]) -> dict[int, str]:
    return {rank.rank: phase_sentence(rank) for rank in ranks}
