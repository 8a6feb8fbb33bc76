"""The row of a cell, made once, from its job and what its tries came to."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dcpbench.core.axes import AXES
from dcpbench.core.statuses import shown
from dcpbench.executors.base import HostUsed, Outcome
from dcpbench.records.metrics import METRICS, PHASE_S, SHARED_CELL_S, Measurement, aggregated
from dcpbench.records.plain_values import plain_row
from dcpbench.records.rank_report import RankReport
from dcpbench.records.row import Row
from dcpbench.sweep.plan.job import Job
from dcpbench.sweep.run.verdict import Verdict

_OF_VERDICT = (
    "status",
    "checks",
    "powered",
    "resume",
    "training",
    "max_abs_diff",
    "first_mismatch",
    "fault_seen",
)
_FIRST_CAUSE = ("rank", "host", "local_rank", "phase", "upload_under_way", "limit", "doing", "log_tail")


@dataclass(frozen=True)
class Try:
    """One try of a cell: its verdict, how its stages ended, when it started (ISO 8601), how long it took and
    what its checkpoints took up."""

    verdict: Verdict
    started_at: str
    outcomes: Sequence[Outcome] = ()
    cell_s: float | None = None
    disk_bytes: int | None = None

    @property
    def is_ok(self) -> bool:
        """Whether it came out as it should."""
        return shown(self.verdict.status, fault_seen=self.verdict.fault_seen).ok

    @property
    def reports(self) -> list[RankReport]:
        """What the ranks of all its stages reported."""
        return [report for outcome in self.outcomes for report in outcome.reports]

    @property
    def hosts(self) -> list[HostUsed]:
        """Those of the stage that ran on most of them, where there may be several."""
        return max(([*outcome.hosts] for outcome in self.outcomes), key=len, default=[])

    @property
    def measurements(self) -> list[Measurement]:
        """All that its ranks, and the driver, measured."""
        offsets_s = [abs(host.clock_offset_s) for host in self.hosts]
        own = {
            "cell_s": self.cell_s,
            "disk_bytes": self.disk_bytes,
            "clock_offset_s": max(offsets_s, default=None),
        }
        of_driver = [Measurement(name, value, None) for name, value in own.items() if value is not None]
        return [one for report in self.reports for one in report.measurements] + of_driver


def row_of(job: Job, tries: Sequence[Try], shared: bool = False) -> Row:
    """The row of a cell that was tried once, or twice: then it is the second try's, and says what the first
    one came to.

    Args:
        shared: other cells ran on the same devices, so that its times mean nothing.
    """
    first, last = tries[0], tries[-1]
    verdict, reason = last.verdict, last.verdict.reason
    details, flaky = dict(verdict.details), None
    if dropped := [told for one in tries for outcome in one.outcomes for told in outcome.dropped]:
        details["dropped_messages"] = dropped
    if hosts := [asdict(host) for host in last.hosts]:
        details["hosts"] = hosts
    if phases := _phases(last.outcomes):
        details["phases"] = phases
    if first is not last:
        flaky = first.verdict.status != verdict.status
        details["first_try"] = _first_try(first)
        if flaky:
            was = f"the first try ended as {first.verdict.status}: {first.verdict.reason}"
            reason = f"{reason}; {was}" if reason else f"flaky: {was}"
    metrics = aggregated(last.measurements)
    if shared:
        kept = {name: None if spec.unit == "s" else metrics[name] for name, spec in METRICS.items()}
        metrics = kept | {SHARED_CELL_S: metrics["cell_s"]}
    row = Row(
        axes={name: job.columns[name] for name in AXES},
        **{name: value for name, value in job.columns.items() if name not in AXES},
        **{name: getattr(verdict, name) for name in _OF_VERDICT},
        reason=reason,
        metrics=metrics,
        flaky=flaky,
        started_at=last.started_at,
        details=details,
        **_losses(last.reports),
        **_bounds(last.reports),
    )
    reports = (report for outcome in last.outcomes for report in (*outcome.reports, *outcome.before))
    return plain_row(row, [f"rank {report.rank}: {one}" for report in reports for one in report.replaced])


def _phases(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Seconds by phase: of each stage those of the rank that was in phases for longest, so that they add
    up."""
    seconds: dict[str, float] = {}
    for outcome in outcomes:
        spent = [
            [one for one in of.measurements if one.metric == PHASE_S]
            for of in (*outcome.reports, *outcome.before)
        ]
        for one in max(spent, key=lambda of_rank: sum(one.value for one in of_rank), default=[]):
            phase = (one.phase or "").partition("/")[0]
            seconds[phase] = seconds.get(phase, 0.0) + one.value
    return seconds


def _first_try(first: Try) -> dict[str, Any]:
    verdict = first.verdict
    return {
        "status": verdict.status,
        "reason": verdict.reason,
        "started_at": first.started_at,
        "cell_s": first.cell_s,
        "failed_checks": [check for check, held in verdict.checks.items() if held is False],
        **{key: verdict.details[key] for key in _FIRST_CAUSE if key in verdict.details},
    }


def _losses(reports: Sequence[RankReport]) -> dict[str, Any]:
    """The losses at the newest checkpoint that was resumed from, of the first rank."""
    of_rank = [report for report in reports if report.rank == 0]
    losses = {name: values for report in of_rank for name, values in report.losses.items()}
    resumed = {step: values for report in of_rank for step, values in report.resumed.items()}
    newest = max(resumed, default=0)
    if not resumed.get(newest):
        return {}
    last = newest + len(resumed[newest])
    return {
        "loss_at_save": _of_step(losses.get("continued", []), newest),
        "loss_resumed": resumed[newest][-1],
        "loss_continued": _of_step(losses.get("continued", []), last),
        "loss_twin": _of_step(losses.get("twin", []), last),
    }


def _bounds(reports: Sequence[RankReport]) -> dict[str, Any]:
    """How gradients and steps were compared with the twin's, where that was done first."""
    return next((report.bounds for report in reports if report.bounds), {})


def _of_step(losses: list[float], step: int) -> float | None:
    """A step's loss, if the run came that far: a wrong restore may have gone on for longer."""
    return losses[step - 1] if 0 < step <= len(losses) else None
