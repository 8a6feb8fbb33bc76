"""One lane of a sweep: runs one cell after the other on ranks of its own, from a cell to its row."""

import datetime
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from multiprocessing.context import ForkServerContext
from pathlib import Path

from rich.console import Console

from dcpbench.config.groups import Isolation
from dcpbench.executors.outcome import Ended
from dcpbench.executors.rank_group import RankGroup
from dcpbench.records.store import Row, as_it_should_be
from dcpbench.sweep.plan import known_failures
from dcpbench.sweep.plan.disk import DiskUse, bytes_in
from dcpbench.sweep.plan.job import Job
from dcpbench.sweep.run import retry, row_builder
from dcpbench.sweep.run.progress import ProgressDisplay
from dcpbench.worker.messages import CellSpec


@dataclass
class Lane:
    """The ranks that cells run on, with GPUs out of `gpus` if they use any."""

    folder: Path
    gpus: tuple[int, ...]
    context: ForkServerContext
    console: Console
    disk: DiskUse
    stopping: bool = False
    _ranks: RankGroup | None = None
    _leaving: list[RankGroup] = field(default_factory=list)

    def run(self, job: Job, display: ProgressDisplay) -> Row:
        """Run a cell, once more if it did not come out as it should; the row of its last try."""
        display.begin(job.cell.name)
        row = replace(job.begun, details={})
        blank, checkpoints = replace(row), job.checkpoints(self.folder)
        row.started_at = _now()
        if job.skip:
            row.status, row.reason = "skip", job.skip
            return row
        if too_little := self.disk.why_skip(job.config, checkpoints):
            row.status, row.reason = "skip", too_little
            return row
        try:
            job.cell.write_hydra_folder()
            checkpoints.mkdir(parents=True)
        except OSError as error:
            row.status, row.reason = "error", f"the cell's folder could not be made: {error}"
            return row
        on_phase = display.phases_of(job.cell.name)
        self._try(job, row, checkpoints, on_phase)
        first, keep = row, job.config.keep_checkpoints
        if self.stopping or not retry.due(first, job.config):
            self._say(retry.clear(keep, first, checkpoints))
            return first
        try:
            aside = retry.set_aside(job.cell.folder, checkpoints)
        except OSError as error:
            self._say(f"{first.cell}: no second try: {error}")
            return first
        row = replace(blank, started_at=_now(), details={})
        display.begin(row.cell, "second try")
        self._try(job, row, checkpoints, on_phase)
        retry.settle(first, row)
        self._say(retry.clear(keep, row, checkpoints), retry.clear_first(keep, row, aside))
        return row

    def close(self) -> None:
        """Let the ranks leave; does not wait for them."""
        if self._ranks:
            self._ranks.close()
            self._leaving.append(self._ranks)
            self._ranks = None

    def stop(self) -> None:
        """End what runs in another thread: its cell ends at once, and no other is begun."""
        self.stopping = True
        if ranks := self._ranks:
            ranks.end()

    def end(self) -> None:
        """End the ranks, and wait for those that are leaving."""
        if self._ranks:
            self._ranks.kill()
        for group in self._leaving:
            group.join()

    def _try(self, job: Job, row: Row, checkpoints: Path, on_phase: Callable[[int, str], None]) -> None:
        started = time.monotonic()
        spec = CellSpec(job.config, str(job.cell.folder), str(checkpoints))
        try:
            group = self._group(job)
        except (OSError, EOFError) as error:
            row.reason = f"the ranks could not be started: {error}"
            return
        ended = group.run(spec, job.config.timeouts, on_phase)
        try:
            failed = row_builder.finish(row, ended)
        except Exception as error:  # noqa: BLE001 - a scenario's report may hold anything
            row.status, failed = "error", {}
            row.reason = f"the ranks' reports cannot be judged: {type(error).__name__}: {error}"
        known_failures.apply(row, failed, job.known_failures)
        row_builder.look_for_fault(row, job.config.fault)
        # A planted fault that was seen did its damage to the cell's own state only.
        keep = as_it_should_be(row) and job.config.isolation is Isolation.warm
        self._release(group, ended, keep)
        row.disk_bytes = bytes_in(checkpoints)
        row.cell_s = time.monotonic() - started

    def _group(self, job: Job) -> RankGroup:
        """The ranks for a cell: those of the last one if they are of its kind, else fresh ones."""
        if self._ranks and self._ranks.kind != job.kind:
            self.close()
        if self._ranks and not self._ranks.usable():  # a rank has died since its last cell
            self._ranks.kill()
            self._ranks = None
        if self._ranks is None:
            self._ranks = RankGroup.start(self.context, job.kind, job.cell.folder, self.gpus)
        return self._ranks

    def _release(self, group: RankGroup, ended: Ended, keep: bool) -> None:
        """Keep the ranks for the next cell, or let them leave; end those that did not come through."""
        if ended.status:
            group.kill()
            self._ranks = None
        elif not keep:
            self.close()
        for leaving in [item for item in self._leaving if item.left()]:
            leaving.kill()
            self._leaving.remove(leaving)

    def _say(self, *sentences: str | None) -> None:
        for sentence in filter(None, sentences):
            self.console.print(sentence, soft_wrap=True)


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
