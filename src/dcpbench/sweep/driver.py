"""Run the cells of a sweep on as many runners as the machine has room for, and write their rows."""

import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from dcpbench.config.groups import Sharing
from dcpbench.core.rank_report import Imports
from dcpbench.executors.base import Engine, Executor, HostsLostError
from dcpbench.records import files, store
from dcpbench.records.row import Run
from dcpbench.records.store import ResultsError, RowLog
from dcpbench.report.styles import text_of
from dcpbench.sweep.cell_runner import CellRunner, Finished, Mismatches
from dcpbench.sweep.plan import Plan, PlannedCell
from dcpbench.sweep.progress import ProgressDisplay
from dcpbench.sweep.resources import Times, places, stretches
from dcpbench.sweep.signals import uninterrupted


@dataclass
class Sweep:
    """Run the cells that have no row in the `log`.

    Cells that need the same ranks run one after another, or at the same time where the machine has room
    (`dcpbench.sweep.resources`). Each runner has a thread, but only the main thread writes rows. Ranks stay
    up until `end`, whatever `run` raises.
    """

    folder: Path
    plan: Plan
    engine: Engine
    console: Console
    log: RowLog
    earlier_machines: list[dict[str, Any]] = field(default_factory=list)
    written: int = 0
    interrupted_by: ResultsError | HostsLostError | None = None
    """The cause that ended the sweep before its last cell."""
    _times: Times = field(init=False)
    _repeated: dict[Mismatches, str] = field(default_factory=dict)
    _imports: dict[str, Imports] = field(default_factory=dict)
    _executors: dict[tuple[int, tuple[int, ...]], Executor] = field(default_factory=dict)
    """By the number of the runner and the GPUs of its ranks."""

    def run(self) -> None:
        """Run the cells that have no row. Rows that were written are kept, whatever is raised.

        Raises:
            KeyboardInterrupt: the user interrupted.
        """
        self._times = Times(self.log.rows.values())
        to_run = [cell for cell in self.plan.cells if cell.run not in self.log.rows]
        left = {cell.run: cell for cell in to_run}
        self._describe_machine()
        of_all = len(self.plan.cells), len(self.log.rows), self.plan.titles
        with ProgressDisplay(self.console, *of_all) as display:
            for together in stretches(to_run):
                self._run_together(together, display, left)

    def end(self) -> None:
        """End all ranks, remove what they leaked, and complete the description of the machine."""
        for executor in self._executors.values():
            executor.end()
        self.engine.end()
        self.plan.machine.description.update(self.engine.details())
        self._describe_machine()

    def _describe_machine(self) -> None:
        described = {**self.plan.environment}
        if self.earlier_machines:
            described["earlier"] = self.earlier_machines
        store.write_json(self.folder / store.ENVIRONMENT_JSON, described)

    def _run_together(
        self, together: Sequence[PlannedCell], display: ProgressDisplay, left: dict[Run, PlannedCell]
    ) -> None:
        """Run cells that need the same ranks, and write each row when its cell ends; `left` have no row
        yet."""
        machine = self.plan.machine
        if any(cell.shares_gpus for cell in together):
            machine.description.update(self.engine.details())  # with the memory of the GPUs
        gpus = machine.gpus
        numbered = list(enumerate(places(together, gpus, machine.gpu_memory_bytes)))
        for place in self._executors.keys() - set(numbered):
            self._executors[place].keep_only(set())
        shared = len(numbered) > 1 and together[0].config.sharing is Sharing.correctness
        # Executors of an earlier stretch keep their ranks, which can be used again.
        executors = [self._executors.setdefault(one, self.engine.executor(one[1])) for one in numbered]
        common = (self.console, display, shared, self._repeated, self._imports)
        runners = [CellRunner(self.folder, executor, *common) for executor in executors]
        idle = deque(runners)

        def run(cell: PlannedCell) -> Finished:
            runner = idle.popleft()
            try:
                return runner.run(cell)
            finally:
                idle.append(runner)

        with ThreadPoolExecutor(len(runners)) as threads:
            try:
                for ended in as_completed([threads.submit(run, cell) for cell in together]):
                    finished = ended.result()
                    left.pop(finished.row.run, None)
                    self._times.add(finished.row)
                    with uninterrupted():  # written and remembered, or neither
                        self._write(finished)
                        self.written += 1
                    display.end(finished.row, lambda: self._times.left(left.values(), gpus))
            except BaseException:  # an interrupt, or a row that cannot be written
                threads.shutdown(wait=False, cancel_futures=True)
                for runner in runners:
                    runner.executor.interrupt()
                raise

    def _write(self, finished: Finished) -> None:
        """Write the measurements of a cell, and its row last. If the disk is full, the checkpoints of the
        cell are removed to make room for its row.

        Raises:
            ResultsError: it cannot be written even so.
        """
        row, is_measured = finished.row, False
        try:
            store.append_measurements(self.folder, row, finished.measurements)
            is_measured = True
            self.log.append(row)
        except ResultsError:
            checkpoints = [one for one in finished.cell.checkpoints if os.path.lexists(one)]
            if not checkpoints:
                raise
            for sentence in filter(None, (files.remove(one, one.parent) for one in checkpoints)):
                self.console.print(text_of(sentence), soft_wrap=True)
            if not is_measured:
                store.append_measurements(self.folder, row, finished.measurements)
            note = "its checkpoints were removed to make room for this row"
            self.log.append(replace(row, reason="; ".join(filter(None, (row.reason, note)))))
