"""Run one cell after another on one executor, from its plan to its row.

A run that is not ok is repeated, on fresh ranks and in another folder, so that earlier cells cannot affect
the verdict of its retry, which has a row of its own. If that has another status, the run is `flaky`; it is
not ok in either case. A mismatch that a retry has repeated is not random: later cells that fail in the same
way are not retried.
"""

import datetime
import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from rich.console import Console

from dcpbench.compose.cells import write_hydra_folder
from dcpbench.config.groups import Isolation, KeepCheckpoints, StorageConfig
from dcpbench.config.schema import Config
from dcpbench.config.text import counted
from dcpbench.core.metrics import Measurement
from dcpbench.core.mismatch import Problem
from dcpbench.core.rank_report import Imports
from dcpbench.core.stage_end import StageEnd
from dcpbench.executors.base import Executor, HostsLostError
from dcpbench.plan.estimates import bytes_in, too_little_space
from dcpbench.plan.plan import PlannedCell, own_packages
from dcpbench.rank.messages import CellSpec, RunId
from dcpbench.records import files
from dcpbench.records.row import Row
from dcpbench.sweep.progress import ProgressDisplay, print_sentences
from dcpbench.sweep.row_builder import Attempt, row_of
from dcpbench.verdict.first_cause import stop_of
from dcpbench.verdict.verdict import Verdict

_NAMED = 10
"""How many segments of shared memory are named; the rest are only counted."""
Mismatches = tuple[tuple[str, ...], frozenset[tuple[str, str, Problem]]]
"""How a cell failed: the axes that these cells share, and its mismatches by check, name and kind."""


@dataclass(frozen=True)
class Finished:
    """A run of a cell that has ended: its row, and its measurements."""

    cell: PlannedCell
    row: Row
    measurements: list[Measurement]


@dataclass
class CellRunner:
    """Run cells on the ranks of an executor; with `shared` others run on the same devices."""

    folder: Path
    executor: Executor
    console: Console
    display: ProgressDisplay
    shared: bool = False
    known_to_repeat: dict[Mismatches, str] = field(default_factory=dict)
    """Mismatches that a retry has repeated, with its cell; shared by the runners of a sweep."""
    imports: dict[str, Imports] = field(default_factory=dict)
    """Packages that the first ranks of a user's code have imported, by its targets and device."""

    def run(self, cell: PlannedCell) -> list[Finished]:
        """Run a cell, and once more if it is not ok. Return the end of this run, and of its retry."""
        first, retry, second = self._run(cell, cell.name), cell.retry, None
        flaky = None
        if needs_retry(first, cell.config) and not self.executor.interrupted:
            second, not_again = self._retried(retry, first, cell.name)
            if not_again:
                first.verdict.details["no_retry"] = not_again
        if second:
            flaky = first.verdict.status != second.verdict.status
            # What has failed twice in the same way is kept once.
            print_sentences(
                self.console, *remove_checkpoints(cell.config, not second.is_ok and flaky, retry.checkpoints)
            )
        print_sentences(self.console, *remove_checkpoints(cell.config, not first.is_ok, cell.checkpoints))
        ended = [self._finished(cell, first, flaky)]
        return [*ended, self._finished(retry, second)] if second else ended

    def _retried(
        self, retry: PlannedCell, first: Attempt, shown_as: str
    ) -> tuple[Attempt | None, str | None]:
        """Run a cell again, or return why not."""
        failure = _failure_pattern(retry.config, first.verdict)
        if failure in self.known_to_repeat:
            return None, f"repeated by a retry in {self.known_to_repeat[failure]}"
        try:
            second = self._run(retry, shown_as, "retry")
        except HostsLostError as error:
            print_sentences(self.console, *_remove_all(retry.config.storage, retry.checkpoints))
            return None, str(error)
        if not second.ends:
            return None, second.verdict.reason
        if failure and failure == _failure_pattern(retry.config, second.verdict):
            self.known_to_repeat.setdefault(failure, shown_as)
        return second, None

    def _finished(self, cell: PlannedCell, end: Attempt, flaky: bool | None = None) -> Finished:
        try:
            row = row_of(cell, end, self.shared, flaky)
        except Exception as error:  # noqa: BLE001 - a scenario's report may hold anything
            text = f"the ranks' reports cannot be put into a row: {type(error).__name__}: {error}"
            end = replace(end, ends=(), verdict=Verdict("error", text))
            row = row_of(cell, end, self.shared, flaky)
        return Finished(cell, row, end.measurements)

    def _run(self, cell: PlannedCell, shown_as: str, note: str = "") -> Attempt:
        """Run a cell once; the progress is shown with this name and note. Without ranks it has no ends."""
        self.display.begin(shown_as, note)
        try:
            if skip := cell.skip or too_little_space(cell.config.storage, cell.checkpoints):
                return Attempt(Verdict("skip", skip), _now())
            try:
                write_hydra_folder(cell.folder, cell.overrides, cell.requested)
                cell.checkpoints.mkdir(parents=True)
            except OSError as error:
                return Attempt(Verdict("error", f"the cell's folder could not be made: {error}"), _now())
            return self._attempt(cell, shown_as)
        except (OSError, RecursionError) as error:  # as of a network file system that is gone
            self.executor.keep_only(set())
            return Attempt(Verdict("error", f"the cell could not be run: {error}"), _now())

    def _attempt(self, cell: PlannedCell, shown_as: str) -> Attempt:
        started_at, started = _now(), time.monotonic()
        ends = self._stages(cell, shown_as)
        try:
            verdict = cell.verdict(ends)
        except Exception as error:  # noqa: BLE001 - a scenario's report may hold anything
            text = f"{type(error).__name__}: {error}"
            verdict = Verdict("error", f"the ranks' reports cannot be judged: {text}")
        print_sentences(self.console, *(f"{cell.name}: {message}" for end in ends for message in end.dropped))
        if left := [name for end in ends for name in end.unremoved_memory]:
            what = counted(len(left), "segment") + " of shared memory, which another program may have made"
            print_sentences(self.console, f"{cell.name}: did not remove {what}: {', '.join(left[:_NAMED])}")
        disk_bytes, cell_s = bytes_in(cell.checkpoints), time.monotonic() - started
        attempt = Attempt(verdict, started_at, ends, cell_s, disk_bytes)
        # An injected fault that was detected damaged only the state of its cell.
        if not attempt.is_ok or cell.config.isolation is not Isolation.warm or cell.runs_own_code:
            self.executor.keep_only(set())
        return attempt

    def _stages(self, cell: PlannedCell, shown_as: str) -> list[StageEnd]:
        """Run the stages of a cell up to the first that does not end as expected."""
        ends: list[StageEnd] = []
        # A sweep that was interrupted can have left objects.
        print_sentences(self.console, remove_objects(cell.config.storage, cell.checkpoints))
        on_phase = partial(self.display.phase, shown_as)
        self.executor.keep_only(set(cell.world_specs))
        code = f"{own_packages(cell.config)} {cell.config.device}"
        for number, kind in enumerate(cell.world_specs):
            run = RunId(self.folder.name, cell.name, number)
            spec = CellSpec(run, cell.config, str(cell.folder), str(cell.checkpoints))
            kind = replace(kind, imports=self.imports.get(code, Imports()))
            ends.append(self.executor.run(kind, spec, cell.config.timeouts, on_phase))
            if cell.runs_own_code and ends[-1].reports:
                self.imports.setdefault(code, ends[-1].reports[0].imports)
            if cell.config.restarts:
                self.executor.keep_only(set())
            stopped = stop_of(ends[-1], cell.expected.dies.get(number))
            if stopped or any(report.skip for report in ends[-1].reports):
                break
        return ends


def needs_retry(attempt: Attempt, config: Config) -> bool:
    """Return whether a run is repeated: its ranks have run, and it is not ok. A cell with an injected fault
    is not: the fault would be there again."""
    return config.retry > 0 and config.fault.target is None and bool(attempt.ends) and not attempt.is_ok


def _failure_pattern(config: Config, verdict: Verdict) -> Mismatches | None:
    """Return how a cell failed; None if not by mismatches."""
    if verdict.status != "fail":
        return None
    axes = (config.scenario.name, config.parallel.name, config.save.name, config.model.name)
    differing = (
        (check.check, mismatch.name, mismatch.problem)
        for check in verdict.failed
        for mismatch in check.mismatches
    )
    return axes, frozenset(differing)


def remove_checkpoints(config: Config, failed: bool, checkpoints: Path) -> list[str]:
    """Remove the checkpoints of a run, unless they are to be kept, from their folder and from their store.
    Return a sentence for each of these that could not be removed.

    Args:
        failed: the run is not ok.
    """
    keep = config.keep_checkpoints
    if keep is KeepCheckpoints.all or (keep is KeepCheckpoints.failed and failed):
        return []
    return _remove_all(config.storage, checkpoints)


def _remove_all(storage: StorageConfig, checkpoints: Path) -> list[str]:
    in_folder = files.remove(checkpoints, within=checkpoints.parent)
    return [*filter(None, (in_folder, remove_objects(storage, checkpoints)))]


def remove_objects(storage: StorageConfig, checkpoints: Path) -> str | None:
    """Remove a cell's checkpoints from a store; return a sentence if that failed."""
    if storage.url:
        from dcpbench.checkpointers.object_store import ObjectStore

        objects = ObjectStore(storage.url, storage.options.get("file_system", {}))
        try:
            objects.remove(str(checkpoints))
        except Exception as error:  # noqa: BLE001 - whatever a client raises
            return f"{objects.place(str(checkpoints))} could not be removed: {type(error).__name__}: {error}"
    return None


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
