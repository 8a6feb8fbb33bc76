"""Run the cells of a sweep on as many runners as the machine has room for; write and report their rows."""

import os
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from dcpbench.config.groups import Sharing
from dcpbench.config.text import command_text, counted, done_text, path_text
from dcpbench.core.rank_report import Imports
from dcpbench.executors.base import Engine, Executor, HostsLostError
from dcpbench.plan.at_once import by_training, gpus_of_runners, groups_by_ranks
from dcpbench.plan.estimates import TimeEstimates
from dcpbench.plan.plan import Plan, PlannedCell
from dcpbench.records import files, store
from dcpbench.records.row import INTERRUPTED, Row, RunKey, exit_status
from dcpbench.records.store import ResultsError, read_rows, write_csv
from dcpbench.sweep.cell_runner import CellRunner, Finished, Mismatches
from dcpbench.sweep.progress import ProgressDisplay, print_sentences
from dcpbench.sweep.signals import uninterrupted


@dataclass
class SweepDriver:
    """Run the cells that have none of the `rows`, which have no `details`.

    Cells that need the same ranks run one after another, or at the same time where the machine has room
    (`dcpbench.plan.at_once`). Each runner has a thread, but only the main thread writes rows. Ranks stay
    up until `end`, whatever `run` raises.
    """

    folder: Path
    plan: Plan
    engine: Engine
    console: Console
    rows: dict[RunKey, Row]
    earlier_machines: list[dict[str, Any]] = field(default_factory=list)
    written: int = 0
    interrupted_by: ResultsError | HostsLostError | None = None
    """The cause that ended the sweep before its last cell."""
    _kept: list[Row] = field(init=False, default_factory=list)
    """The rows of an earlier command."""
    _times: TimeEstimates = field(init=False)
    _known_to_repeat: dict[Mismatches, str] = field(default_factory=dict)
    _imports: dict[str, Imports] = field(default_factory=dict)
    _executors: dict[tuple[int, tuple[int, ...]], Executor] = field(default_factory=dict)
    """By the number of the runner and the GPUs of its ranks."""

    def run(self) -> None:
        """Run the cells that have no row. Rows that were written are kept, whatever is raised.

        Raises:
            KeyboardInterrupt: the user interrupted.
        """
        self._kept = [*self.rows.values()]
        self._times = TimeEstimates(self._kept)
        to_run = [cell for cell in self.plan.cells if cell.run not in self.rows]
        left = {cell.run: cell for cell in to_run}
        self._describe_machine()
        done = len(self.plan.cells) - len(to_run)
        of_all = len(self.plan.cells), done, self.plan.titles
        with ProgressDisplay(self.console, *of_all) as display:
            for together in groups_by_ranks(by_training(to_run)):
                self._run_together(together, display, left)

    def end(self) -> None:
        """End all ranks, remove what they leaked, and complete the description of the machine."""
        for executor in self._executors.values():
            executor.end()
        self.engine.end()
        self.plan.machine.description.update(self.engine.details())
        self._describe_machine()

    def close(self, is_part: bool, status: int, began: float) -> int:
        """End the ranks, write the reports, print the table, and return the exit status. The last line says
        how many cells are left, if there are any.

        Args:
            is_part: another part of the sweep can have cells that were not skipped.
            status: the exit status so far; 0 if only the rows decide it.
            began: when the command began, of `time.monotonic`.
        """
        try:
            self.end()
            rows, damaged = read_rows(self.folder) if self.rows else ([], [])
        except ResultsError as wrong:
            self.interrupted_by = self.interrupted_by or wrong
            rows, damaged = [*self.rows.values()], []
        what = "run" if self.plan.distinct < len(self.plan.cells) else "cell"
        number = sum(row.retry_of is None for row in rows)
        done, complete = done_text(number, len(self.plan.cells), what), number == len(self.plan.cells)
        if error := self.interrupted_by:
            first = "free disk space, then " if isinstance(error, ResultsError) and error.no_room else ""
            print_sentences(
                self.console,
                f"interrupted: {done}: {error}; {first}run: {command_text('resume', self.folder)}",
            )
            return 1
        before = None
        if rows:
            before = self._report(rows, damaged)
            if not is_part and all(row.status == "skip" for row in rows):
                print_sentences(self.console, "every cell was skipped: nothing was measured")
            spent_s = time.monotonic() - began
            print_sentences(
                self.console, f"{counted(self.written, what)} in {spent_s:.1f} s, written to {self.folder}"
            )
        failed = not all(row.is_ok for row in self._kept)
        print_sentences(self.console, *next_steps(self.folder, before, complete, failed))
        if not complete:
            print_sentences(self.console, f"{'interrupted: ' if status == INTERRUPTED else ''}{done}")
        if is_part:
            return status or int(not complete or not all(row.is_ok for row in rows))
        return status or (exit_status(rows) if complete else 1)

    def _report(self, rows: Sequence[Row], damaged: Sequence[str]) -> Path | None:
        """Write and print all reports, and which could not be written. Return the sweep to compare with."""
        from dcpbench.analysis.cell_identity import sweep_before
        from dcpbench.analysis.frame import sweep_of
        from dcpbench.report.show import print_report, write_reports

        sweep = sweep_of(self.folder, rows, damaged)
        before = sweep_before(self.folder, sweep.frame)
        for show in (
            partial(write_csv, self.folder, rows),
            partial(write_reports, self.folder, before, sweep),
            partial(print_report, sweep),
        ):
            try:
                show()
            except ResultsError as error:
                print_sentences(self.console, str(error))
        return before

    def _describe_machine(self) -> None:
        described = {**self.plan.environment}
        if self.earlier_machines:
            described["earlier"] = self.earlier_machines
        store.write_json(self.folder / store.ENVIRONMENT_JSON, described)

    def _run_together(
        self, together: Sequence[PlannedCell], display: ProgressDisplay, left: dict[RunKey, PlannedCell]
    ) -> None:
        """Run cells that need the same ranks, and write each row when its cell ends; `left` have no row
        yet."""
        machine = self.plan.machine
        if any(cell.shares_gpus for cell in together):
            machine.description.update(self.engine.details())  # with the memory of the GPUs
        gpus = machine.gpus
        numbered = list(enumerate(gpus_of_runners(together, gpus, machine.gpu_memory_bytes)))
        for place in self._executors.keys() - set(numbered):
            self._executors[place].keep_only(set())
        shared = len(numbered) > 1 and together[0].config.sharing is Sharing.correctness
        # Executors of an earlier stretch keep their ranks, which can be used again.
        executors = [self._executors.setdefault(place, self.engine.executor(place[1])) for place in numbered]
        common = (self.console, display, shared, self._known_to_repeat, self._imports)
        runners = [CellRunner(self.folder, executor, *common) for executor in executors]
        idle = deque(runners)

        def run(cell: PlannedCell) -> list[Finished]:
            runner = idle.popleft()
            try:
                return runner.run(cell)
            finally:
                idle.append(runner)

        with ThreadPoolExecutor(len(runners)) as threads:
            try:
                for ended in as_completed([threads.submit(run, cell) for cell in together]):
                    finished = ended.result()
                    row = finished[0].row
                    left.pop(row.run, None)
                    self._times.add(row)
                    with uninterrupted():  # written and remembered, or neither
                        self._write(finished)
                        self.written += 1
                    display.end(row, lambda: self._times.remaining_s(left.values(), gpus))
            except BaseException:  # an interrupt, or a row that cannot be written
                threads.shutdown(wait=False, cancel_futures=True)
                for runner in runners:
                    runner.executor.interrupt()
                raise

    def _write(self, finished: Sequence[Finished]) -> None:
        """Write the measurements of a run of a cell and of its retry, and their rows last. If the disk is
        full, their checkpoints are removed to make room for them.

        Raises:
            ResultsError: they cannot be written even so.
        """
        rows, measured = [run.row for run in finished], deque(finished)

        def append() -> None:
            while measured:
                store.append_measurements(self.folder, measured[0].row, measured[0].measurements)
                measured.popleft()
            store.append_row(self.folder, *rows)
            self.rows |= {row.run: replace(row, details={}) for row in rows}

        try:
            append()
        except ResultsError:
            checkpoints = [place for run in finished if os.path.lexists(place := run.cell.checkpoints)]
            if not checkpoints:
                raise
            print_sentences(self.console, *(files.remove(folder, folder.parent) for folder in checkpoints))
            note = "its checkpoints were removed to make room for this row"
            rows = [replace(row, reason="; ".join(filter(None, (row.reason, note)))) for row in rows]
            append()


def next_steps(folder: Path, before: Path | None, complete: bool, failed: bool = False) -> list[str]:
    """Return a line with the page, and one with the next command: resume where rows are missing, else compare
    with the sweep `before`; rerun what has `failed` in an earlier command."""
    page = folder / "report.html"
    lines = [f"page: {path_text(page)}"] if page.is_file() else []
    if not complete:
        lines.append(f"next: {command_text('resume', folder)}")
    elif before:
        lines.append(f"next: {command_text('compare', before, folder)}")
    if complete and failed:
        lines.append(f"to run failed cells again: {command_text('resume', folder)} --rerun-failed")
    return lines
