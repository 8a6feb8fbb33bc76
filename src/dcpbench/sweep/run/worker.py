"""Runs one cell after the other on an executor of its own, from a job to its row.

A cell that did not come out as it should is tried once more, on fresh ranks into a folder of its own for
checkpoints: what an earlier cell may have done to the ranks of the first try cannot make its verdict. Where
the first came to something else, the row says so (`flaky`), and is not as it should be. A mismatch that a
second try has repeated once is no matter of chance: cells that fail alike after it are not tried again.
"""

import datetime
import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from rich.console import Console

from dcpbench.checkpointers.object_store import ObjectStore
from dcpbench.config.groups import Ending, Isolation, KeepCheckpoints, StageConfig, StorageConfig
from dcpbench.config.schema import Config
from dcpbench.config.text import counted
from dcpbench.core.metrics import Measurement
from dcpbench.core.mismatch import Problem
from dcpbench.executors.base import Executor, HostsLostError, Outcome
from dcpbench.records import files
from dcpbench.records.row import Row
from dcpbench.report.styles import text_of
from dcpbench.sweep.plan.job import Job
from dcpbench.sweep.plan.resources import Costs, bytes_in
from dcpbench.sweep.run.progress import ProgressDisplay
from dcpbench.sweep.run.row_builder import Try, row_of
from dcpbench.sweep.run.verdict import Verdict, verdict_of
from dcpbench.worker.messages import CellSpec, RunId

FIRST_TRY = "first-try"
_NAMED = 10
"""How many segments of shared memory are named; the others are only counted."""
Mismatches = tuple[tuple[str, ...], frozenset[tuple[str, str, Problem]]]
"""What cells fail alike by: axes that they share, and what differs by check, name and kind."""


@dataclass(frozen=True)
class Finished:
    """A cell that has ended: its row, and all that was measured in the try that it is of."""

    job: Job
    row: Row
    measurements: list[Measurement]


@dataclass
class Worker:
    """Runs cells on the ranks of an executor; `shared` says that others do so on the same devices."""

    folder: Path
    executor: Executor
    console: Console
    display: ProgressDisplay
    costs: Costs
    shared: bool = False
    repeated: dict[Mismatches, str] = field(default_factory=dict)
    """What second tries have repeated, and of which cell; shared by the workers of a sweep."""

    def run(self, job: Job) -> Finished:
        """Run a cell, once more if it did not come out as it should."""
        self.display.begin(job.cell.name)
        tries = self._tries(job)
        try:
            row = row_of(job, tries, self.shared)
        except Exception as error:  # noqa: BLE001 - as above
            text = f"the ranks' reports cannot be put into a row: {type(error).__name__}: {error}"
            tries = [replace(one, outcomes=()) for one in tries]
            tries[-1] = replace(tries[-1], verdict=Verdict("error", text))
            row = row_of(job, tries, self.shared)
        return Finished(job, row, tries[-1].measurements)

    def _tries(self, job: Job) -> list[Try]:
        checkpoints, of_second = job.checkpoints(self.folder)
        if skip := job.skip or self.costs.why_skip(job.key, job.config.storage, checkpoints):
            return [Try(Verdict("skip", skip), _now())]
        try:
            job.cell.write_hydra_folder()
            checkpoints.mkdir(parents=True)
        except OSError as error:
            return [Try(Verdict("error", f"the cell's folder could not be made: {error}"), _now())]
        first = self._try(job, 0, checkpoints)
        alike = _mismatches(job.config, first.verdict)
        if alike in self.repeated:
            first.verdict.details["no_second_try"] = f"a second one has repeated it in {self.repeated[alike]}"
        if self.executor.interrupted or alike in self.repeated or not is_due(first, job.config):
            self._print(*clear(job.config, not first.is_ok, checkpoints))
            return [first]
        try:
            set_aside(job.cell.folder)
            of_second.mkdir()
        except OSError as error:
            self._print(f"{job.cell.name}: no second try: {error}")
            return [first]
        self.display.begin(job.cell.name, "second try")
        try:
            second = self._try(job, 1, of_second)
        except HostsLostError as error:
            first.verdict.details["no_second_try"] = str(error)
            self._print(*clear(job.config, True, checkpoints), *_remove_all(job.config.storage, of_second))
            return [first]
        flaky = first.verdict.status != second.verdict.status
        if alike and alike == _mismatches(job.config, second.verdict):
            self.repeated.setdefault(alike, job.cell.name)
        self._print(*clear(job.config, not second.is_ok, of_second), *clear(job.config, flaky, checkpoints))
        return [first, second]

    def _try(self, job: Job, attempt: int, checkpoints: Path) -> Try:
        started_at, started = _now(), time.monotonic()
        outcomes = self._stages(job, attempt, checkpoints)
        try:
            verdict = verdict_of(job, outcomes)
        except Exception as error:  # noqa: BLE001 - a scenario's report may hold anything
            text = f"{type(error).__name__}: {error}"
            verdict = Verdict("error", f"the ranks' reports cannot be judged: {text}")
        self._print(*(f"{job.cell.name}: {told}" for outcome in outcomes for told in outcome.dropped))
        if left := [name for outcome in outcomes for name in outcome.left]:
            what = counted(len(left), "segment") + " of shared memory that another program may have made"
            self._print(f"{job.cell.name}: did not remove {what}: {', '.join(left[:_NAMED])}")
        disk_bytes, cell_s = bytes_in(checkpoints), time.monotonic() - started
        tried = Try(verdict, started_at, outcomes, cell_s, disk_bytes)
        # A planted fault that was seen did its damage to the cell's own state only.
        if not tried.is_ok or job.config.isolation is not Isolation.warm:
            self.executor.keep_only(set())
        return tried

    def _stages(self, job: Job, attempt: int, checkpoints: Path) -> list[Outcome]:
        """How the stages of a cell ended, up to the first that did not end as it is expected to."""
        outcomes: list[Outcome] = []
        # Of a try before, or a sweep that was broken off.
        self._print(remove_objects(job.config.storage, checkpoints))
        on_phase = partial(self.display.phase, job.cell.name)
        self.executor.keep_only(set(job.kinds))
        for number, stage in enumerate(job.config.stages):
            run = RunId(self.folder.name, job.cell.name, attempt, number)
            spec = CellSpec(run, job.config, str(job.cell.folder), str(checkpoints))
            outcome = self.executor.run(job.kind(stage), spec, job.config.timeouts, on_phase)
            outcomes.append(_as_expected(stage, outcome))
            if outcomes[-1].status or any(report.skip for report in outcome.reports):
                break
        return outcomes

    def _print(self, *sentences: str | None) -> None:
        for sentence in filter(None, sentences):
            self.console.print(text_of(sentence), soft_wrap=True)


def is_due(tried: Try, config: Config) -> bool:
    """Whether a cell runs once more. A planted fault that was not seen is never tried again: it would
    be until somebody sees it."""
    return config.retry > 0 and config.fault.target is None and not tried.is_ok


def _mismatches(config: Config, verdict: Verdict) -> Mismatches | None:
    """What a cell failed by; None if it is not by what was compared."""
    if verdict.status != "fail":
        return None
    axes = (config.scenario.name, config.parallel.name, config.save.name, config.model.name)
    differing = ((one.check, each.name, each.problem) for one in verdict.failed for each in one.findings)
    return axes, frozenset(differing)


def set_aside(folder: Path) -> None:
    """Move the logs of the first try away.

    Raises:
        OSError: they cannot be moved.
    """
    aside = folder / FIRST_TRY
    aside.mkdir()
    for log in folder.glob("rank*.log"):
        log.rename(aside / log.name)


def clear(config: Config, failed: bool, checkpoints: Path) -> list[str]:
    """Remove the checkpoints of a try, in their folder and in their store, that are not to be kept; a
    sentence for each of these if they would not go.

    Args:
        failed: it did not come out as it should, or, of a first try, other than the second.
    """
    keep = config.keep_checkpoints
    if keep is KeepCheckpoints.all or (keep is KeepCheckpoints.failed and failed):
        return []
    return _remove_all(config.storage, checkpoints)


def _remove_all(storage: StorageConfig, checkpoints: Path) -> list[str]:
    """Remove the checkpoints of a try, in their folder and in their store; a sentence for each of these if
    they would not go."""
    in_folder = files.remove(checkpoints, within=checkpoints.parent)
    return [*filter(None, (in_folder, remove_objects(storage, checkpoints)))]


def remove_objects(storage: StorageConfig, checkpoints: Path) -> str | None:
    """Remove what lies in a store of a cell's checkpoints; a sentence if it would not go."""
    if objects := ObjectStore.of(storage):
        try:
            objects.remove(str(checkpoints))
        except Exception as error:  # noqa: BLE001 - whatever a client raises
            return f"{objects.place(str(checkpoints))} could not be removed: {type(error).__name__}: {error}"
    return None


def _as_expected(stage: StageConfig, outcome: Outcome) -> Outcome:
    """The outcome of a stage; a death that it is there for is none that counts."""
    if stage.ends is Ending.report:
        return outcome
    if outcome.status == stage.ends.value:
        return replace(outcome, status=None, cause=None)
    if outcome.status:
        return outcome
    return replace(outcome, status="error", problem=f"a rank was to die in {stage.target}, and none did")


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
