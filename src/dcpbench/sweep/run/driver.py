"""The driver: takes the cells of a sweep through workers, as many as there is room for, and writes a row for
each."""

import queue
import threading
from collections.abc import Generator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from rich.console import Console

from dcpbench.config.groups import Sharing
from dcpbench.executors import cleanup
from dcpbench.executors.fork_server import Machine
from dcpbench.executors.local import LocalExecutor
from dcpbench.records.row import Row
from dcpbench.records.store import (
    ENVIRONMENT_JSON,
    ResultsError,
    append_measurements,
    append_row,
    write_json,
)
from dcpbench.sweep.plan import estimate
from dcpbench.sweep.plan.disk import DiskUse
from dcpbench.sweep.plan.job import Job
from dcpbench.sweep.run import retry, schedule
from dcpbench.sweep.run.progress import ProgressDisplay
from dcpbench.sweep.run.worker import Finished, Worker

_ENDED_S = 30.0


@dataclass
class Sweep:
    """One run over a list of jobs, but those that are `done`; a row is forgotten once it is written.

    Cells that need the same ranks run one after another, and at once where the machine has room
    (`dcpbench.sweep.run.schedule`): each worker then has a thread, but this one alone writes rows.
    """

    folder: Path
    jobs: list[Job]
    machine: Machine
    context: ForkServerContext
    console: Console
    done: dict[str, Row] = field(default_factory=dict)
    earlier_machines: list[dict[str, Any]] = field(default_factory=list)
    written: int = 0
    _disk: DiskUse = field(default_factory=DiskUse)
    _workers: list[Worker] = field(default_factory=list)
    _leaving: list[Worker] = field(default_factory=list)

    def run(self) -> None:
        """Run every job; whatever happens, the rows so far are kept and no rank is left behind.

        Raises:
            KeyboardInterrupt: the user broke off.
        """
        to_run = [job for job in self.jobs if job.cell.name not in self.done]
        left = schedule.estimates(to_run, self.machine.gpus)
        times = estimate.times_of(self.done.values())
        for job in self.jobs:
            if row := self.done.get(job.cell.name):
                self._disk.add(job.key, row["disk_bytes"])
        self._describe_machine()
        cleanup.adopt_orphans()
        try:
            with ProgressDisplay(self.console, len(self.jobs), len(self.done)) as display:
                for together in schedule.stretches(to_run):
                    with closing(self._run_together(together, display)) as ended:
                        for finished in ended:
                            left.pop(finished.row.cell, None)
                            times.add(finished.row)
                            self._disk.add(finished.job.key, finished.row["disk_bytes"])
                            self._write(finished)
                            self.written += 1
                            display.end(finished.row, lambda: times.left(left.values()))
                    for worker in self._workers:
                        worker.executor.release()
        finally:
            for worker in (*self._leaving, *self._workers):
                worker.executor.end()
            cleanup.end_orphans()
            self.machine.complete()
            self._describe_machine()

    def _describe_machine(self) -> None:
        earlier = {"earlier": self.earlier_machines} if self.earlier_machines else {}
        commit = {"git_commit": self.jobs[0].columns["git_commit"]}
        write_json(self.folder / ENVIRONMENT_JSON, {**self.machine.description, **commit, **earlier})

    def _run_together(
        self, together: Sequence[Job], display: ProgressDisplay
    ) -> Generator[Finished, None, None]:
        """Run jobs that need the same ranks; each as it ends."""
        self._leaving += self._workers
        places = schedule.places(together, self.machine.gpus)
        shared = len(places) > 1 and together[0].config.sharing is Sharing.correctness
        self._workers = [
            Worker(self.folder, LocalExecutor(self.context, gpus), self.console, self._disk, shared)
            for gpus in places
        ]
        if len(self._workers) == 1:
            for job in together:
                yield self._workers[0].run(job, display)
            return
        waiting: queue.SimpleQueue[Job] = queue.SimpleQueue()
        for job in together:
            waiting.put(job)
        ended: queue.SimpleQueue[Finished | BaseException] = queue.SimpleQueue()

        def work(worker: Worker) -> None:
            try:
                with suppress(queue.Empty):
                    while not worker.stopping:
                        ended.put(worker.run(waiting.get_nowait(), display))
            except BaseException as error:  # noqa: BLE001 - for the thread that waits
                ended.put(error)

        threads = [threading.Thread(target=work, args=(worker,)) for worker in self._workers]
        for thread in threads:
            thread.start()
        try:
            for _ in together:
                finished = ended.get()
                if isinstance(finished, BaseException):
                    raise finished
                yield finished
        except BaseException:  # an interrupt, or whoever takes the rows gives up
            for worker in self._workers:
                worker.stop()
            raise
        finally:
            for thread in threads:
                thread.join(_ENDED_S)

    def _write(self, finished: Finished) -> None:
        """Write what was measured, and the row last. A row comes before the checkpoints of its cell, where
        there is no room for both.

        Raises:
            ResultsError: it cannot be written all the same.
        """
        row, checkpoints = finished.row, finished.job.checkpoints(self.folder)
        try:
            self._append(finished, row)
        except ResultsError:
            if not checkpoints.exists():
                raise
            if sentence := retry.remove(checkpoints):
                self.console.print(sentence, soft_wrap=True)
            note = "(its checkpoints were removed to make room for this row)"
            self._append(finished, replace(row, reason=f"{row.reason} {note}"))

    def _append(self, finished: Finished, row: Row) -> None:
        append_measurements(self.folder, row, finished.measurements)
        append_row(self.folder, row)
