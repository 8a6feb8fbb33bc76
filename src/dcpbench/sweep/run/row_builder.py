"""From how a cell ended on its ranks to its row."""

import re
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from dcpbench.config.groups import FaultConfig
from dcpbench.config.schema import Config
from dcpbench.executors.outcome import Ended
from dcpbench.records.store import Row
from dcpbench.records.verdict import RankReport, Verdict, judge
from dcpbench.sweep.plan.cells import SweepCell


def begun(cell: SweepCell, config: Config, torch_version: str, git_commit: str | None) -> Row:
    """A row with all that is known before the cell runs."""
    return Row(
        cell=cell.name,
        status="error",
        reason=None,
        scenario=config.scenario.name,
        parallel=config.parallel.name,
        compile=config.compile,
        save=config.save.name,
        model=config.model.name,
        optimizer=config.optimizer.name,
        storage=config.storage.name,
        world_size=config.world_size if isinstance(config.world_size, int) else None,
        device=config.device.value,
        seed=config.seed,
        fault=config.fault.name if config.fault.target else None,
        load_parallel=config.loading.name if config.scenario.converts else None,
        overrides=" ".join(cell.overrides),
        torch_version=torch_version,
        git_commit=git_commit,
        config_dir=cell.config_dir,
        repeat=config.repeat,
    )


def finish(row: Row, ended: Ended) -> dict[str, list[str]]:
    """Write into a row what the ranks reported.

    Returns:
        for each check that did not hold, the names of the state that differs.
    """
    if ended.status:
        row.status, row.reason = ended.status, ended.reason
        reported = sorted(report.rank for report in ended.reports)
        row.details = {"reports_of_ranks": reported, **ended.details}
        return {}
    if all(report.skip for report in ended.reports):
        row.status, row.reason = "skip", ended.reports[0].skip
        return {}
    verdict = judge(ended.reports)
    _verdict(row, verdict)
    _measured(row, ended.reports)
    return verdict.failed


def look_for_fault(row: Row, fault: FaultConfig) -> None:
    """Say whether a planted fault was seen: by a check, or by a loader that refused, and by its name."""
    if row.fault is None or row.status == "skip":
        return
    told = re.search(fault.sees, row.reason or "") is not None
    row.fault_seen = row.status in ("fail", "error") and told
    if not row.fault_seen:
        row.reason = f"fault={row.fault} was not seen as {fault.sees!r}: {row.reason or 'nothing was'}"


def _verdict(row: Row, verdict: Verdict) -> None:
    row.status, row.reason = verdict.status, verdict.reason
    for name, held in verdict.checks.items():
        setattr(row, name, held)
    row.powered = verdict.powered
    row.max_abs_diff = verdict.max_abs_diff
    row.first_mismatch = verdict.first_mismatch
    row.details = verdict.details


def _measured(row: Row, reports: Sequence[RankReport]) -> None:
    row.build_s = _slowest(reports, lambda report: report.phases.get("build"))
    row.train_s = _slowest(reports, lambda report: report.phases.get("train"))
    row.verify_s = _slowest(reports, lambda report: report.phases.get("verify"))
    row.save_s = _slowest(reports, lambda report: _median(report.save_s))
    row.save_stall_s = _slowest(reports, lambda report: _median(report.save_stall_s))
    row.load_s = _slowest(reports, lambda report: _median(report.load_s))
    row.raw_write_s = _slowest(reports, lambda report: _median(report.raw_write_s))
    row.raw_read_s = _slowest(reports, lambda report: _median(report.raw_read_s))
    row.checkpoint_bytes = _slowest(reports, lambda report: report.checkpoint_bytes)
    row.peak_device_bytes = _slowest(reports, lambda report: report.peak_device_bytes)
    row.peak_host_bytes = _slowest(reports, lambda report: report.peak_host_bytes)
    report = reports[0]
    newest = max(report.resumed, default=0)
    if report.resumed.get(newest):
        last = newest + len(report.resumed[newest])
        row.loss_at_save = _of_step(report.losses["continued"], newest)
        row.loss_resumed = report.resumed[newest][-1]
        row.loss_continued = _of_step(report.losses["continued"], last)
        row.loss_twin = _of_step(report.losses["twin"], last)


def _of_step(losses: list[float], step: int) -> float | None:
    """A step's loss, if the run came that far: a wrong restore may have gone on for longer."""
    return losses[step - 1] if 0 < step <= len(losses) else None


def _slowest(reports: Sequence[RankReport], of: Callable[[RankReport], Any]) -> Any:
    return max((value for report in reports if (value := of(report)) is not None), default=None)


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None
