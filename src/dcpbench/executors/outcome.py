"""How a cell ended on its ranks: what happened first, on which rank, in which phase."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dcpbench.executors import stack_dumps
from dcpbench.executors.rank_handle import Rank
from dcpbench.executors.timeouts import Limit
from dcpbench.records.verdict import RankReport

_DEATH_IS_SEEN_S = 0.25
"""How much later than its peers, whose connections break at once, the driver may see that a rank died."""


@dataclass(frozen=True)
class Ended:
    """All reports, or a status with its reason and, for the row's details, more about it."""

    reports: list[RankReport]
    status: str | None = None
    reason: str | None = None
    details: dict[str, Any] = field(default_factory=dict)


def ended(ranks: Sequence[Rank], limit: Limit) -> Ended:
    """How a cell ended on these ranks; `limit` is what they ran into, if nothing else went wrong."""
    reports = [rank.report for rank in ranks if rank.report is not None]
    if len(reports) == len(ranks):
        return Ended(reports)
    first = _first_cause(ranks)
    if first is None:
        return _timeout(ranks, reports, limit)
    if first.failed:
        phase = first.failed.phase
        status, reason = "error", f"rank {first.number} in {phase}: {first.failed.error}"
    else:
        phase = first.phase
        status, reason = "crash", f"rank {first.number} {first.end()} in {first.where()}"
        if frame := stack_dumps.fatal(first.log):
            reason += f" at {frame}"
    details = {
        "rank": first.number,
        "phase": phase,
        "upload_under_way": bool(first.uploads),
        "log_tail": stack_dumps.tail(first.log),
    }
    return Ended(reports, status, reason, details)


def _first_cause(ranks: Sequence[Rank]) -> Rank | None:
    """The rank to which it happened first: one that raised or died by itself. What sounds like an echo
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


def _timeout(ranks: Sequence[Rank], reports: list[RankReport], limit: Limit) -> Ended:
    doing = stack_dumps.dump(ranks)
    late = [rank for rank in ranks if limit.concerns(rank)]
    others = [rank for rank in ranks if rank.waiting and rank not in late]
    if limit.phase is None:
        said = f"{limit} still in {_phases(late)}"
    else:
        said = f"{limit} still in {limit.phase} ({_numbers(late)})"
    if others:
        said += f", others in {_phases(others)}"
    if doing:
        said += f"; {_places(doing)}"
    details = {"limit": limit.key, "doing": {str(number): frame for number, frame in doing.items()}}
    return Ended(reports, "timeout", f"{said}; stacks are in the ranks' logs", details)


def _phases(ranks: Sequence[Rank]) -> str:
    by_phase: dict[str, list[Rank]] = {}
    for rank in ranks:
        by_phase.setdefault(rank.where(), []).append(rank)
    return "; ".join(f"{phase} ({_numbers(there)})" for phase, there in by_phase.items())


def _places(doing: dict[int, str]) -> str:
    by_frame: dict[str, list[int]] = {}
    for number, frame in doing.items():
        by_frame.setdefault(frame, []).append(number)
    return ", ".join(f"rank {', '.join(map(str, numbers))} {frame}" for frame, numbers in by_frame.items())


def _numbers(ranks: Sequence[Rank]) -> str:
    return f"rank {', '.join(str(rank.number) for rank in ranks)}"
