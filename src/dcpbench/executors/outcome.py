"""How a stage ends on its ranks: the limits of time that it has, and what happened first, where."""

import signal
from collections.abc import Mapping, Sequence

from dcpbench.executors import stack_dumps
from dcpbench.executors.base import Outcome
from dcpbench.executors.rank_handle import Rank
from dcpbench.records.findings import LimitReached, RankDeath
from dcpbench.records.rank_report import RankReport

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


def outcome_of(ranks: Sequence[Rank], phase: str, limit_s: float) -> Outcome:
    """How a stage ended on these ranks; the limit of `phase` is what they ran into, if nothing else went
    wrong."""
    reports = [rank.report for rank in ranks if rank.report is not None]
    if len(reports) == len(ranks):
        return Outcome(reports)
    first = _first_cause(ranks)
    if first is None:
        return _timeout(ranks, reports, phase, limit_s)
    details = {
        "rank": first.number,
        "phase": first.phase,
        "upload_under_way": bool(first.uploads),
        "log_tail": stack_dumps.tail(first.log),
    }
    if failed := first.failed:
        heard = [(rank, rank.failed) for rank in ranks if rank.failed]
        raised = tuple(one.error for rank, one in heard if rank is first or not one.secondary)
        before = [one.report for _, one in heard if one.report]
        details["phase"] = failed.error.phase
        return Outcome(reports, "error", failed.error, raised=raised, before=before, details=details)
    frame = stack_dumps.fatal(first.log)
    death = RankDeath(first.number, first.phase, first.ending(), bool(first.uploads), frame)
    return Outcome(reports, "crash", death, details=details)


def _first_cause(ranks: Sequence[Rank]) -> Rank | None:
    """The rank to which it happened first: one that raised or died by itself. What may be an echo
    of another's end counts only where there is nothing else."""
    causes = [(rank.failed.at, rank) for rank in ranks if rank.failed and not rank.failed.secondary]
    for rank in ranks:
        if rank.gone_at is not None:
            # A rank that aborts may have found a peer dead, so that one goes first.
            aborted = rank.process.exitcode == -signal.SIGABRT
            head_start_s = 0.0 if aborted else _DEATH_IS_SEEN_S
            causes.append((rank.gone_at - head_start_s, rank))
    echoes = [(rank.failed.at, rank) for rank in ranks if rank.failed]
    if not causes and echoes:
        # It may have died after its own report, when nobody was listening any more.
        causes = [(0.0, rank) for rank in ranks if rank.report and not rank.process.is_alive()]
    return min(causes or echoes, key=lambda cause: cause[0], default=(0.0, None))[1]


def _timeout(ranks: Sequence[Rank], reports: list[RankReport], phase: str, limit_s: float) -> Outcome:
    doing = stack_dumps.dump(ranks)
    waiting = [rank for rank in ranks if rank.waiting]
    late = {rank.number: rank.where() for rank in waiting if phase == _CELL or rank.is_at(phase)}
    others = {rank.number: rank.where() for rank in waiting if rank.number not in late}
    of_phase = None if phase == _CELL else phase
    reached = LimitReached(f"timeouts.{phase}_s", limit_s, of_phase, late, others, doing)
    details = {"limit": reached.key, "doing": {str(number): frame for number, frame in doing.items()}}
    return Outcome(reports, "timeout", reached, details=details)
