"""Make the row of a cell from its plan and the end of its run."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from dcpbench.core.metrics import METRICS, PHASE_S, SHARED_CELL_S, Measurement
from dcpbench.core.rank_report import RankReport
from dcpbench.core.stage_end import HostUsed, StageEnd
from dcpbench.core.statuses import shown
from dcpbench.plan.plan import PlannedCell
from dcpbench.records.plain_values import Replacing
from dcpbench.records.row import Row, column_types
from dcpbench.verdict.sentences import replaced_sentence
from dcpbench.verdict.verdict import Verdict

_OF_VERDICT = {one.name for one in fields(Verdict)} & {one.name for one in fields(Row)} - {"checks"}
"""The columns that a verdict sets."""
_OVER_SAVES: dict[str, Callable[[list[float]], float]] = {
    "median": statistics.median,
    "max": max,
    "last": lambda values: values[-1],
}
"""Ways to make one value of the measurements of a rank, by their names in `MetricSpec.over_saves`."""


@dataclass(frozen=True)
class Attempt:
    """An attempt at a cell: its verdict, its start (ISO 8601), the ends of its stages, its duration and the
    size of its checkpoints."""

    verdict: Verdict
    started_at: str
    ends: Sequence[StageEnd] = ()
    cell_s: float | None = None
    disk_bytes: int | None = None

    @property
    def is_ok(self) -> bool:
        """Whether its verdict is ok."""
        return shown(self.verdict.status, fault_seen=self.verdict.fault_seen).ok

    @property
    def reports(self) -> list[RankReport]:
        """The reports of the ranks of all its stages."""
        return [report for end in self.ends for report in end.reports]

    @property
    def hosts(self) -> list[HostUsed]:
        """The hosts of the stage that ran on most hosts."""
        return max(([*end.hosts] for end in self.ends), key=len, default=[])

    @property
    def measurements(self) -> list[Measurement]:
        """All measurements of its ranks and of the driver."""
        offsets_s = [abs(host.clock_offset_s) for host in self.hosts]
        of_the_driver = {
            "cell_s": self.cell_s,
            "disk_bytes": self.disk_bytes,
            "clock_offset_s": max(offsets_s, default=None),
        }
        of_driver = [
            Measurement(name, value, None) for name, value in of_the_driver.items() if value is not None
        ]
        return [measurement for report in self.reports for measurement in report.measurements] + of_driver


def row_of(cell: PlannedCell, run: Attempt, shared: bool = False, flaky: bool | None = None) -> Row:
    """Make the row of a run of a cell.

    Args:
        shared: other cells ran on the same devices, so its times are not recorded.
        flaky: its retry had another status; None if it was not retried.
    """
    verdict = run.verdict
    columns = {name: getattr(verdict, name) for name in _OF_VERDICT}
    columns["details"] = details = dict(verdict.details)
    if dropped := [message for end in run.ends for message in end.dropped]:
        details["dropped_messages"] = dropped
    if hosts := [asdict(host) for host in run.hosts]:
        details["hosts"] = hosts
    if phases := _phases(run.ends):
        details["phases"] = phases
    metrics = _aggregated(run.measurements)
    if shared:
        kept = {name: None if spec.unit == "s" else metrics[name] for name, spec in METRICS.items()}
        metrics = kept | {SHARED_CELL_S: metrics["cell_s"]}
    shares = next((report.training_from for report in run.reports if report.training_from), None)
    about = {**cell.columns, "flaky": flaky, "started_at": run.started_at}
    about["training_from"] = shares
    flat = {**about, **columns, **verdict.checks, **metrics, **_losses(run.reports), **_noted(run.reports)}
    observed = (report for end in run.ends for report in end.observed)
    return _row(flat, [f"rank {report.rank}: {check}" for report in observed for check in report.replaced])


def _aggregated(measurements: Iterable[Measurement]) -> dict[str, float | int | None]:
    """Return the row's value of every metric; None if it was not measured."""
    by_rank: dict[tuple[str, str | None], dict[int | None, list[float]]] = {}
    for measurement in measurements:
        # Time in a part of a phase (`verify/twin`) is time in the phase.
        phase = (measurement.phase or "").partition("/")[0] if measurement.metric == PHASE_S else None
        by_rank.setdefault((measurement.metric, phase), {}).setdefault(measurement.rank, []).append(
            measurement.value
        )
    values: dict[str, float | int | None] = dict.fromkeys(METRICS)
    for name, spec in METRICS.items():
        over_saves = sum if spec.whole_phase else _OVER_SAVES[spec.over_saves]
        if ranks := by_rank.get((PHASE_S, spec.phase) if spec.whole_phase else (name, None)):
            value = max(map(over_saves, ranks.values()))
            values[name] = int(value) if spec.whole else value
    return values


def _row(flat: Mapping[str, Any], replaced: list[str]) -> Row:
    """Return the row of these columns. Values that they cannot hold are replaced; reason and details name
    them, and those that the ranks replaced."""
    replacing, types = Replacing(as_json=True), column_types()
    flat = {name: replacing.column(value, types[name], name) for name, value in flat.items()}
    if replaced := [*replaced, *replacing.replaced]:
        flat["reason"] = "; ".join(filter(None, (flat["reason"], replaced_sentence(replaced))))
        flat["details"] = {**flat["details"], "replaced": replaced}
    return Row.of(flat)


def _phases(ends: Sequence[StageEnd]) -> dict[str, float]:
    """Return seconds by phase, of each stage those of the rank whose phases took longest, so that they add
    up."""
    seconds: dict[str, float] = {}
    for end in ends:
        spent = [
            [measurement for measurement in of.measurements if measurement.metric == PHASE_S]
            for of in end.observed
        ]
        for measurement in max(
            spent, key=lambda of_rank: sum(measurement.value for measurement in of_rank), default=[]
        ):
            phase = (measurement.phase or "").partition("/")[0]
            seconds[phase] = seconds.get(phase, 0.0) + measurement.value
    return seconds


def _noted(reports: Sequence[RankReport]) -> dict[str, Any]:
    """Return the columns that the first rank which did has noted."""
    types = column_types()
    every = ([note for note in report.notes if note.kind == "column"] for report in reports)
    return {note.name: types[note.name].python(note.text) for note in next(filter(None, every), [])}


def _losses(reports: Sequence[RankReport]) -> dict[str, Any]:
    """Return the losses of rank 0 at the newest checkpoint that was resumed from."""
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


def _of_step(losses: list[float], step: int) -> float | None:
    """Return a step's loss, None if the run did not reach it: a wrong restore may have trained for longer."""
    return losses[step - 1] if 0 < step <= len(losses) else None
