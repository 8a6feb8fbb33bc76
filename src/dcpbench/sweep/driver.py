"""The driver: takes the cells of a sweep one by one through the ranks and writes a row for each."""

import datetime
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from rich.console import Console

from dcpbench.config import Config, ConfigError, Isolation, KeepCheckpoints
from dcpbench.rank.messages import CellSpec
from dcpbench.results import (
    ENVIRONMENT_JSON,
    ResultsError,
    Row,
    append_row,
    as_it_should_be,
    write_json,
)
from dcpbench.sweep import estimate, known, processes, retry, rows, validity
from dcpbench.sweep.cells import SweepCell
from dcpbench.sweep.disk import DiskUse, bytes_in
from dcpbench.sweep.ending import Ended
from dcpbench.sweep.fingerprint import code_digest, config_digest
from dcpbench.sweep.folder import git_commit
from dcpbench.sweep.machine import Machine
from dcpbench.sweep.pool import GroupKind, RankGroup
from dcpbench.sweep.progress import ProgressDisplay


@dataclass(frozen=True)
class Job:
    """A cell with its device and world size decided, and why it cannot run if it cannot; `begun` is
    its row before it runs."""

    cell: SweepCell
    config: Config
    skip: str | None
    known_failures: list[known.KnownFailure]
    begun: Row

    def checkpoints(self, sweep: Path) -> Path:
        """Where its checkpoints go, in a sweep of that folder."""
        root = self.config.storage.root
        return Path(root) / sweep.name / self.cell.name if root else self.cell.folder / "checkpoints"


def plan(cells: Sequence[SweepCell], machine: Machine, conf: Path) -> list[Job]:
    """Decide for every cell of a sweep whether and on what it runs; nothing is written.

    Raises:
        ConfigError: one of the cells is wrong; its message names the cell if there are several.
    """
    lists: dict[Path, list[known.KnownFailure]] = {}
    jobs: list[Job] = []
    commit, version = git_commit(), str(machine.description["torch"])
    for cell in cells:
        try:
            config = validity.resolve(cell.config, machine)
            skip = validity.why_skip(cell.config, config)
            path = Path(cell.config.known_failures or conf / "known_failures.yaml")
            if path not in lists:
                lists[path] = known.read(path)
        except ConfigError as error:
            where = f" (in {cell.name})" if len(cells) > 1 else ""
            raise ConfigError(f"{error}{where}") from None
        row = rows.begun(cell, config, version, commit)
        row.config_digest = config_digest(config, row, lists[path])
        row.code_digest = code_digest(config)
        jobs.append(Job(cell, config, skip, lists[path], row))
    _refuse_shared_folders(cells)
    return jobs


def _refuse_shared_folders(cells: Sequence[SweepCell]) -> None:
    taken: dict[Path, str] = {}
    for cell in cells:
        if (other := taken.setdefault(cell.folder, cell.name)) != cell.name:
            raise ConfigError(f"hydra.sweep.subdir: {other} and {cell.name} would share {cell.folder}")


@dataclass
class Sweep:
    """One run over a list of jobs, but those that are `done`; a row is forgotten once it is written."""

    folder: Path
    jobs: list[Job]
    machine: Machine
    context: ForkServerContext
    console: Console
    done: dict[str, Row] = field(default_factory=dict)
    earlier_machines: list[dict[str, Any]] = field(default_factory=list)
    written: int = 0
    _ranks: RankGroup | None = None
    _leaving: list[RankGroup] = field(default_factory=list)
    _disk: DiskUse = field(default_factory=DiskUse)

    def run(self) -> None:
        """Run every job; whatever happens, the rows so far are kept and no rank is left behind.

        Raises:
            KeyboardInterrupt: the user broke off.
        """
        begun = next(job.begun for job in self.jobs)
        to_run = [job for job in self.jobs if job.cell.name not in self.done]
        alike = [estimate.keys(job.begun) for job in to_run]
        times = estimate.times_of(self.done.values())
        for job in self.jobs:
            if job.cell.name in self.done:
                self._disk.add(job.config, self.done[job.cell.name])

        def describe() -> None:
            earlier = {"earlier": self.earlier_machines} if self.earlier_machines else {}
            machine = {**self.machine.description, "git_commit": begun.git_commit, **earlier}
            write_json(self.folder / ENVIRONMENT_JSON, machine)

        describe()
        processes.adopt_orphans()
        try:
            with ProgressDisplay(self.console, len(self.jobs), len(self.done)) as display:
                for job in to_run:
                    row = replace(job.begun, details={})
                    display.begin(job.cell.name)
                    row = self._run(job, row, display)
                    self._write(job, row)
                    self.written += 1
                    times.add(row)
                    self._disk.add(job.config, row)
                    display.end(row, lambda: times.left(alike[self.written :]))
            if self._ranks:
                self._ranks.close()
                self._leaving.append(self._ranks)
                self._ranks = None
        finally:
            self.machine.complete()
            describe()
            self._end_ranks()

    def _run(self, job: Job, row: Row, display: ProgressDisplay) -> Row:
        """Run a cell, once more if it did not come out as it should; the row of its last try."""
        blank, checkpoints = replace(row), job.checkpoints(self.folder)
        row.started_at = _now()
        if job.skip:
            row.status, row.reason = "skip", job.skip
            return row
        if too_little := self._disk.why_skip(job.config, checkpoints):
            row.status, row.reason = "skip", too_little
            return row
        try:
            job.cell.write_hydra_folder()
            checkpoints.mkdir(parents=True)
        except OSError as error:
            row.status, row.reason = "error", f"the cell's folder could not be made: {error}"
            return row
        self._try(job, row, checkpoints, display)
        first, keep = row, job.config.keep_checkpoints
        if not retry.due(first, job.config):
            self._say(retry.clear(keep, first, checkpoints))
            return first
        try:
            aside = retry.set_aside(job.cell.folder, checkpoints)
        except OSError as error:
            self._say(f"{first.cell}: no second try: {error}")
            return first
        row = replace(blank, started_at=_now(), details={})
        display.begin(f"{row.cell} (second try)")
        self._try(job, row, checkpoints, display)
        retry.settle(first, row)
        self._say(retry.clear(keep, row, checkpoints), retry.clear_first(keep, row, aside))
        return row

    def _try(self, job: Job, row: Row, checkpoints: Path, display: ProgressDisplay) -> None:
        started = time.monotonic()
        spec = CellSpec(job.config, str(job.cell.folder), str(checkpoints))
        try:
            group = self._group(job)
        except (OSError, EOFError) as error:
            row.reason = f"the ranks could not be started: {error}"
            return
        ended = group.run(spec, job.config.timeouts, display.phase)
        try:
            failed = rows.finish(row, ended)
        except Exception as error:  # noqa: BLE001 - a scenario's report may hold anything
            row.status, failed = "error", {}
            row.reason = f"the ranks' reports cannot be judged: {type(error).__name__}: {error}"
        known.apply(row, failed, job.known_failures)
        rows.look_for_fault(row, job.config.fault)
        # A planted fault that was seen did its damage to the cell's own state only.
        keep = as_it_should_be(row) and job.config.isolation is Isolation.warm
        self._release(group, ended, keep)
        row.disk_bytes = bytes_in(checkpoints)
        row.cell_s = time.monotonic() - started

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

    def _group(self, job: Job) -> RankGroup:
        """The ranks for a cell: those of the last one if they are of its kind, else fresh ones."""
        config = job.config
        assert isinstance(config.world_size, int)
        kind = GroupKind(config.world_size, config.device.value, config.scenario.process_group)
        if self._ranks and not self._ranks.usable():  # a rank has died since its last cell
            self._ranks.kill()
            self._ranks = None
        if self._ranks and self._ranks.kind != kind:
            self._leaving.append(self._ranks)
            self._ranks.close()
            self._ranks = None
        if self._ranks is None:
            self._ranks = RankGroup.start(self.context, kind, job.cell.folder)
        return self._ranks

    def _release(self, group: RankGroup, ended: Ended, keep: bool) -> None:
        """Keep the ranks for the next cell, or let them leave; end those that did not come through."""
        if ended.status:
            group.kill()
            self._ranks = None
            processes.end_orphans()
        elif not keep:
            group.close()
            self._leaving.append(group)
            self._ranks = None
        for leaving in [item for item in self._leaving if item.left()]:
            leaving.kill()
            self._leaving.remove(leaving)

    def _end_ranks(self) -> None:
        if self._ranks:
            self._ranks.kill()
        for group in self._leaving:
            group.join()
        processes.end_orphans()

    def _say(self, *sentences: str | None) -> None:
        for sentence in filter(None, sentences):
            self.console.print(sentence, soft_wrap=True)


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
