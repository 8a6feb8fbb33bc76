"""The driver: takes the cells of a sweep one by one through the ranks and writes a row for each."""

import datetime
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from rich.console import Console

from dcpbench.config import Config, ConfigError, Isolation, KeepCheckpoints
from dcpbench.rank.messages import CellSpec
from dcpbench.results import (
    ENVIRONMENT_JSON,
    PASSING,
    ResultsError,
    Row,
    append_row,
    as_it_should_be,
    write_json,
)
from dcpbench.sweep import estimate, known, rows, validity
from dcpbench.sweep.cells import SweepCell
from dcpbench.sweep.disk import DiskUse, bytes_in
from dcpbench.sweep.fingerprint import code_digest, config_digest
from dcpbench.sweep.folder import git_commit
from dcpbench.sweep.machine import Machine
from dcpbench.sweep.pool import Ended, GroupKind, RankGroup
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
        alike = [[] if job.skip else estimate.keys(job.begun) for job in to_run]
        times = estimate.times_of(self.done.values())
        for job in self.jobs:
            if job.cell.name in self.done:
                self._disk.add(job.config, self.done[job.cell.name])

        def describe() -> None:
            earlier = {"earlier": self.earlier_machines} if self.earlier_machines else {}
            machine = {**self.machine.description, "git_commit": begun.git_commit, **earlier}
            write_json(self.folder / ENVIRONMENT_JSON, machine)

        describe()
        try:
            with ProgressDisplay(self.console, len(self.jobs), len(self.done)) as display:
                for job in to_run:
                    row = replace(job.begun, details={})
                    display.begin(job.cell.name)
                    self._run(job, row, display)
                    self._write(job, row)
                    self.written += 1
                    times.add(row)
                    self._disk.add(job.config, row)
                    display.end(row, lambda: times.left(filter(None, alike[self.written :])))
            if self._ranks:
                self._ranks.close()
                self._leaving.append(self._ranks)
                self._ranks = None
        finally:
            self._end_ranks()
            self.machine.complete()
            describe()

    def _run(self, job: Job, row: Row, display: ProgressDisplay) -> None:
        row.started_at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        if job.skip:
            row.status, row.reason = "skip", job.skip
            return
        started = time.monotonic()
        checkpoints = job.checkpoints(self.folder)
        if too_little := self._disk.why_skip(job.config, checkpoints):
            row.status, row.reason = "skip", too_little
            return
        try:
            job.cell.write_hydra_folder()
            checkpoints.mkdir(parents=True)
        except OSError as error:
            row.status, row.reason = "error", f"the cell's folder could not be made: {error}"
            return
        spec = CellSpec(job.config, str(job.cell.folder), str(checkpoints))
        group = self._group(job)
        ended = group.run(spec, job.config.timeouts.cell_s, display.phase)
        failed = rows.finish(row, ended)
        known.apply(row, failed, job.known_failures)
        rows.look_for_fault(row, job.config.fault)
        keep = row.status in PASSING and job.config.isolation is Isolation.warm
        self._release(group, ended, keep)
        row.disk_bytes = bytes_in(checkpoints)
        self._clear(job.config.keep_checkpoints, row, checkpoints)
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
            self._clear(KeepCheckpoints.none, row, job.checkpoints(self.folder))
            row.reason = f"{row.reason} (its checkpoints were removed to make room for this row)"
            append_row(self.folder, row)

    def _group(self, job: Job) -> RankGroup:
        """The ranks for a cell: those of the last one if they are of its kind, else fresh ones."""
        config = job.config
        assert isinstance(config.world_size, int)
        kind = GroupKind(config.world_size, config.device.value, config.scenario.process_group)
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

    def _clear(self, keep: KeepCheckpoints, row: Row, checkpoints: Path) -> None:
        well = as_it_should_be(row)
        if keep is KeepCheckpoints.none or (keep is KeepCheckpoints.failed and well):
            with suppress(OSError):
                shutil.rmtree(checkpoints)
