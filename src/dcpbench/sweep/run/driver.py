"""The driver: takes the cells of a sweep through the ranks, in as many lanes as there is room for, and
writes a row for each."""

import queue
import threading
from collections.abc import Generator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from rich.console import Console

from dcpbench.config.groups import KeepCheckpoints, Sharing
from dcpbench.executors import cleanup
from dcpbench.executors.machine import Machine
from dcpbench.records.store import ENVIRONMENT_JSON, ResultsError, Row, append_row, forget_times, write_json
from dcpbench.sweep.plan import estimate
from dcpbench.sweep.plan.disk import DiskUse
from dcpbench.sweep.plan.job import Job
from dcpbench.sweep.run import retry, schedule
from dcpbench.sweep.run.progress import ProgressDisplay
from dcpbench.sweep.run.worker import Lane

_ENDED_S = 30.0


@dataclass
class Sweep:
    """One run over a list of jobs, but those that are `done`; a row is forgotten once it is written.

    Cells that need the same ranks run one after another, and at once where the machine has room
    (`dcpbench.sweep.run.schedule`): each lane then has a thread, but rows are written by this one only.
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
    _lanes: list[Lane] = field(default_factory=list)
    _leaving: list[Lane] = field(default_factory=list)

    def run(self) -> None:
        """Run every job; whatever happens, the rows so far are kept and no rank is left behind.

        Raises:
            KeyboardInterrupt: the user broke off.
        """
        begun = next(job.begun for job in self.jobs)
        to_run = [job for job in self.jobs if job.cell.name not in self.done]
        left = schedule.asked(to_run, self.machine.gpus)
        times = estimate.times_of(self.done.values())
        for job in self.jobs:
            if job.cell.name in self.done:
                self._disk.add(job.config, self.done[job.cell.name])

        def describe() -> None:
            earlier = {"earlier": self.earlier_machines} if self.earlier_machines else {}
            machine = {**self.machine.description, "git_commit": begun.git_commit, **earlier}
            write_json(self.folder / ENVIRONMENT_JSON, machine)

        describe()
        cleanup.adopt_orphans()
        try:
            with ProgressDisplay(self.console, len(self.jobs), len(self.done)) as display:
                for together in schedule.stretches(to_run):
                    with closing(self._run_in_lanes(together, display)) as ended:
                        for job, row in ended:
                            left.pop(job.cell.name, None)
                            times.add(row)
                            self._disk.add(job.config, row)
                            if len(self._lanes) > 1 and job.config.sharing is Sharing.correctness:
                                forget_times(row)
                            self._write(job, row)
                            self.written += 1
                            display.end(row, lambda: times.left(left.values()))
                    for lane in self._lanes:
                        lane.close()
        finally:
            for lane in (*self._leaving, *self._lanes):
                lane.end()
            cleanup.end_orphans()
            self.machine.complete()
            describe()

    def _run_in_lanes(
        self, together: Sequence[Job], display: ProgressDisplay
    ) -> Generator[tuple[Job, Row], None, None]:
        """Run jobs of one kind; each with its row as it ends."""
        self._leaving += self._lanes
        self._lanes = [
            Lane(self.folder, gpus, self.context, self.console, self._disk)
            for gpus in schedule.places(together, self.machine.gpus)
        ]
        if len(self._lanes) == 1:
            for job in together:
                yield job, self._lanes[0].run(job, display)
            return
        waiting: queue.SimpleQueue[Job] = queue.SimpleQueue()
        for job in together:
            waiting.put(job)
        ended: queue.SimpleQueue[tuple[Job, Row] | BaseException] = queue.SimpleQueue()

        def work(lane: Lane) -> None:
            try:
                with suppress(queue.Empty):
                    while not lane.stopping:
                        job = waiting.get_nowait()
                        ended.put((job, lane.run(job, display)))
            except BaseException as error:  # noqa: BLE001 - for the thread that waits
                ended.put(error)

        threads = [threading.Thread(target=work, args=(lane,)) for lane in self._lanes]
        for thread in threads:
            thread.start()
        try:
            for _ in together:
                what = ended.get()
                if isinstance(what, BaseException):
                    raise what
                yield what
        except BaseException:  # an interrupt, or whoever takes the rows gives up
            for lane in self._lanes:
                lane.stop()
            raise
        finally:
            for thread in threads:
                thread.join(_ENDED_S)

    def _write(self, job: Job, row: Row) -> None:
        """A row comes before the checkpoints of its cell, where there is no room for both.

        Raises:
            ResultsError: it cannot be written all the same.
        """
        try:
            append_row(self.folder, row)
        except ResultsError:
            if not job.checkpoints(self.folder).exists():
                raise
            self._say(retry.clear(KeepCheckpoints.none, row, job.checkpoints(self.folder)))
            row.reason = f"{row.reason} (its checkpoints were removed to make room for this row)"
            append_row(self.folder, row)

    def _say(self, sentence: str | None) -> None:
        if sentence:
            self.console.print(sentence, soft_wrap=True)
