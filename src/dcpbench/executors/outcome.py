"""How a stage ends on its ranks: the limits of time that it has, and what happened first, where."""

from collections.abc import Sequence
from dataclasses import dataclass

from dcpbench.config.groups import TimeoutsConfig
from dcpbench.executors import stack_dumps
from dcpbench.executors.base import Outcome
from dcpbench.executors.rank_handle import Rank
from dcpbench.records.findings import LimitReached, RankDeath
from dcpbench.records.rank_report import RankReport

_DEATH_IS_SEEN_S = 0.25
"""How much later than its peers, whose connections break at once, the driver may see that a rank died."""


@dataclass(frozen=True)
class Limit:
    """A limit of the configuration and when it is reached (`time.monotonic`); `phase` is None for the
    whole cell's."""

    at: float
    key: str
    limit_s: float
    phase: str | None = None

    def concerns(self, rank: Rank) -> bool:
        """Whether a rank is still at what took too long."""
        at_it = self.phase in (None, rank.phase) or (self.phase == "upload" and bool(rank.uploads))
        return rank.waiting and at_it


def nearest(timeouts: TimeoutsConfig, began: float, ranks: Sequence[Rank]) -> Limit:
    """The limit that is reached first if no rank gets any further; `began` is when the cell did."""
    limits = timeouts.given()
    clocks = [
        clock
        for rank in ranks
        if rank.waiting
        for clock in ((rank.phase, rank.since), *(("upload", since) for since in rank.uploads))
    ]
    candidates = [
        Limit(since + limits[phase], f"timeouts.{phase}_s", limits[phase], phase)
        for phase, since in clocks
        if phase in limits
    ]
    cell = Limit(began + timeouts.cell_s, "timeouts.cell_s", timeouts.cell_s)
    return min([cell, *candidates], key=lambda limit: limit.at)


def outcome_of(ranks: Sequence[Rank], limit: Limit) -> Outcome:
    """How a stage ended on these ranks; `limit` is what they ran into, if nothing else went wrong."""
    reports = [rank.report for rank in ranks if rank.report is not None]
    if len(reports) == len(ranks):
        return Outcome(reports)
    first = _first_cause(ranks)
    if first is None:
        return _timeout(ranks, reports, limit)
    details = {
        "rank": first.number,
        "phase": first.phase,
        "upload_under_way": bool(first.uploads),
        "log_tail": stack_dumps.tail(first.log),
    }
    if failed := first.failed:
        before = failed.report.checks if failed.report else {}
        return Outcome(reports, "error", failed.error, None, before, details | {"phase": failed.error.phase})
    death = RankDeath(
        first.number, first.phase, first.ending(), bool(first.uploads), stack_dumps.fatal(first.log)
    )
    return Outcome(reports, "crash", death, details=details)


def _first_cause(ranks: Sequence[Rank]) -> Rank | None:
    """The rank to which it happened first: one that raised or died by itself. What may be an echo
    of another's end counts only where there is nothing else."""
    causes = [(rank.failed.at, rank) for rank in ranks if rank.failed and not rank.failed.secondary]
    for rank in ranks:
        if rank.gone_at is not None:
            # A rank that aborts may have found a peer dead, so that one goes first.
            head_start_s = 0.0 if rank.aborted() else _DEATH_IS_SEEN_S
            causes.append((rank.gone_at - head_start_s, rank))
    echoes = [(rank.failed.at, rank) for rank in ranks if rank.failed]
    if not causes and echoes:
        # It may have died after its own report, when nobody was listening any more.
        causes = [(0.0, rank) for rank in ranks if rank.report and not rank.process.is_alive()]
    return min(causes or echoes, key=lambda cause: cause[0], default=(0.0, None))[1]


def _timeout(ranks: Sequence[Rank], reports: list[RankReport], limit: Limit) -> Outcome:
    doing = stack_dumps.dump(ranks)
    late = {rank.number: rank.where() for rank in ranks if limit.concerns(rank)}
    others = {rank.number: rank.where() for rank in ranks if rank.waiting and rank.number not in late}
    reached = LimitReached(limit.key, limit.limit_s, limit.phase, late, others, doing)
    details = {"limit": limit.key, "doing": {str(number): frame for number, frame in doing.items()}}
    return Outcome(reports, "timeout", reached, details=details)
