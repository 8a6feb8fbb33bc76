"""A sweep from Hydra's overrides to its printed table: begun, resumed, or only planned."""

import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import cast

from hydra.core.config_loader import ConfigLoader
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from dcpbench.config.errors import ConfigError
from dcpbench.config.groups import ExecutorConfig, Rerun
from dcpbench.config.schema import MATRIX, PART, REPEATS, is_about_the_sweep
from dcpbench.config.text import counted
from dcpbench.executors import fork_server
from dcpbench.executors.base import Engine, HostsLostError, engine_of
from dcpbench.records.row import INTERRUPTED, exit_status
from dcpbench.records.row_log import RowLog
from dcpbench.records.store import ResultsError, read_lines, write_csv
from dcpbench.report.styles import text_of
from dcpbench.sweep.folder import manifest, next_steps, parts, resume
from dcpbench.sweep.plan import cells as composing
from dcpbench.sweep.plan import dry_run, job, pairwise
from dcpbench.sweep.plan.part import Part
from dcpbench.sweep.plan.runnable import Runnable
from dcpbench.sweep.run import driver
from dcpbench.sweep.run.progress import composing_shown
from dcpbench.sweep.task import objective_of

_MULTIRUN_YAML = "multirun.yaml"
"""The configuration of the sweep, named as by Hydra's own sweeper, which writes it before the first batch."""
_MANY = 50
"""Of more cells a file is told too that they are being composed, which takes seconds."""


class SweepRun:
    """One sweep in one folder, in as many batches as its sweeper hands over.

    dcpbench's own sweeper hands over all cells at once: nothing is written before the last of them is
    known to be right. Of another sweeper's cells only the next batch is known, so such a sweep can be
    neither planned nor resumed, and its folder is claimed before the sweeper may write into it.
    """

    def __init__(self, loader: ConfigLoader, base: DictConfig, own_sweeper: bool) -> None:
        """Decide what can be decided before the first batch.

        Args:
            base: the composition of the sweep itself; `loader` composes its cells.
            own_sweeper: whether the sweep is driven by dcpbench's own sweeper.

        Raises:
            ConfigError: a key that is about the sweep is wrong, or the folder cannot be used.
        """
        self._base, self._own_sweeper = base, own_sweeper
        self.sweeper = str(base.hydra.runtime.choices["hydra/sweeper"])
        self._folder = Path(str(base.hydra.sweep.dir)).resolve()
        self._part = Part.parse(base.part) if base.part else None
        if self._part and self._folder != self._part.folder(self._folder.parent):
            raise ConfigError(f"part={base.part}: must be said on the command line, just so")
        self._value_of = objective_of(base)
        self._cells = composing.CellMaker(loader, base)
        self._console = Console(stderr=True)
        self._claim = ExitStack()
        self._record = manifest.Record(manifest.own_words(sys.argv[1:]), str(Path.cwd()), [], [])
        self._engine: Engine | None = None
        self._driver: driver.Sweep | None = None
        self._started = 0.0
        self._planned = 0
        self._in_batch = False
        self._broken_off: ResultsError | HostsLostError | None = None
        if not own_sweeper:
            _refuse_what_needs_all_cells(base, self.sweeper)
            manifest.refuse_used(self._folder)
            self._claim.enter_context(manifest.held(self._folder))

    @property
    def begun(self) -> bool:
        """Whether a cell may have run."""
        return self._driver is not None

    @property
    def is_left_to_sweeper(self) -> bool:
        """Whether another sweeper than dcpbench's own is at work, between two batches."""
        return not self._own_sweeper and not self._in_batch

    def run(self, job_overrides: Sequence[Sequence[str]], blocks: Sequence[str] = ()) -> list[float | None]:
        """Run the cells of a batch that have no row yet; the value of the objective for each. A plan puts
        cells together by these blocks, if there are any.

        Raises:
            ConfigError, hydra.errors.HydraException, omegaconf.errors.OmegaConfBaseException: the
                configuration is wrong; nothing of this batch was started.
            SystemExit: a row could not be written.
        """
        if not job_overrides:
            raise ConfigError(f"hydra/sweeper={self.sweeper}: asks for no cell")
        self._in_batch = True
        batch = [_of_the_cell(overrides) for overrides in job_overrides]
        jobs = self._next(self._driver, batch) if self._driver else self._first(batch, blocks)
        if self._driver:  # else it is only planned
            try:
                self._driver.run(self._mine(jobs))
            except (ResultsError, HostsLostError) as error:
                self._broken_off = error
                sys.exit(1)
        self._in_batch = False
        rows = self._driver.log.rows if self._driver else {}
        return [self._value_of(rows.get(job.cell.name)) for job in jobs]

    def covering(self, lists: Sequence[Sequence[str]]) -> list[pairwise.Row]:
        """Jobs in which every two values of these lists meet that can run together; what is left out is told.

        Raises:
            ConfigError, hydra.errors.HydraException, omegaconf.errors.OmegaConfBaseException: an override
                is wrong.
        """
        machine = self._begun_engine(lists).probe()
        with composing_shown(self._console):
            runnable = Runnable(self._cells, machine, lists)
        found = pairwise.covering(lists, runnable.runs, runnable.excludes)
        self._print(pairwise.sentence(lists, found))
        return found.rows

    def end(self, status: int) -> int:
        """End the ranks, put the rows in order, write the reports, print the table, and give the folder up.

        Args:
            status: the exit status as far as it is known, 0 if it depends on the rows alone.

        Returns:
            the exit status.
        """
        with self._claim:
            try:
                return self._end(self._driver, status) if self._driver else status or self._planned
            finally:
                if not (self.begun or self._own_sweeper):  # whose sweeper may have left it behind
                    (self._folder / _MULTIRUN_YAML).unlink(missing_ok=True)

    def _first(self, batch: list[list[str]], blocks: Sequence[str]) -> list[job.Job]:
        """The jobs of the first batch, which of dcpbench's own sweeper is the only one. Begins the sweep,
        unless it is only to be planned."""
        base, folder = self._base, self._folder
        before = _resumed(base, folder)
        self._record = before or self._record
        if before is None and self._own_sweeper:
            manifest.refuse_used(folder)
        elif before is not None and not base.plan:
            self._claim.enter_context(manifest.held(folder))
        if self._console.is_terminal or len(batch) > _MANY:  # until the first rank runs there is no other
            doing = "planning" if base.plan else "starting ranks"
            self._print(f"{counted(len(batch), 'cell')}: {doing} ...")
        engine = self._begun_engine(batch)
        with composing_shown(self._console):
            cells = self._cells.cells(batch)
        here = engine.probe()
        of_all = job.plan(cells, here)
        jobs = self._mine(of_all)
        if not jobs:
            raise ConfigError(f"part={base.part}: has none of {counted(len(of_all), 'cell')}")
        if before is not None:
            resume.same_matrix(folder, before, {one.cell.name for one in jobs})
        found = resume.look(folder, read_lines(folder), jobs, base.rerun) if before else None
        log = RowLog(folder, found.standing if found else ())
        sweep = driver.Sweep(folder, list(jobs), here, engine, self._console, log)
        if base.plan:
            manifest.refuse_unusable(folder, begun=before is not None)
            for root in self._new_roots(jobs):
                manifest.refuse_unusable(root / folder.name, "storage.root")
            here.complete()
            mine = {one.cell.name for one in jobs}
            named = [
                block for block, one in zip(blocks, of_all, strict=bool(blocks)) if one.cell.name in mine
            ]
            self._planned = dry_run.print_plan(folder, jobs, named, here.gpus, found, base.plan_as)
            return of_all
        if self._part:
            words = [word for word in self._record.arguments if not word.startswith(f"{PART}=")]
            names, overrides = _asked_for(of_all)
            whole = manifest.Record(words, self._record.cwd, names, [], overrides)
            parts.begin(folder, whole)
        if found:
            self._go_on(sweep, found)
        else:
            self._begin(sweep)
        self._started = time.monotonic()
        # pandas takes up to a second to import, which the driver has while the ranks are at work.
        threading.Thread(target=import_module, args=("dcpbench.report.show",), daemon=True).start()
        self._driver = sweep
        return of_all

    def _mine(self, jobs: Sequence[job.Job]) -> Sequence[job.Job]:
        """Those of all jobs that this driver runs."""
        return self._part.jobs(jobs) if self._part else jobs

    def _begun_engine(self, batch: Sequence[Sequence[str]]) -> Engine:
        """Where ranks will live; it begins to import what they need."""
        if self._engine is None:
            compiles = composing.may_compile(self._base, batch)
            self._engine = engine_of(cast(ExecutorConfig, OmegaConf.to_object(self._base.executor)))
            self._engine.begin([] if self._base.plan else fork_server.rank_imports(compiles))
        return self._engine

    def _next(self, sweep: driver.Sweep, batch: list[list[str]]) -> list[job.Job]:
        """The jobs of another batch."""
        jobs = job.plan(self._cells.cells(batch), sweep.machine)
        sweep.jobs += jobs
        self._write_record(sweep)
        return jobs

    def _begin(self, sweep: driver.Sweep) -> None:
        """Make the folder this sweep's, and write down what was asked for."""
        if self._own_sweeper:
            self._claim.enter_context(manifest.held(self._folder))
            manifest.refuse_used(self._folder)  # once more, now that nobody else can write there
        self._write_record(sweep)
        OmegaConf.save(self._base, self._folder / _MULTIRUN_YAML)

    def _go_on(self, sweep: driver.Sweep, found: resume.Found) -> None:
        """Leave of the sweep that was broken off what stands, and print what does not."""
        self._write_record(sweep)
        for sentence in found.sentences(len(sweep.jobs)):
            self._print(sentence)
        resume.take_up(self._folder, sweep.jobs, found)
        now = {**sweep.machine.description, "git_commit": sweep.jobs[0].columns["git_commit"]}
        sweep.earlier_machines = resume.earlier_machines(self._folder, now)

    def _write_record(self, sweep: driver.Sweep) -> None:
        """Make the sweep's folder below each `storage.root`, but those that it has had before, and write
        down which these are and what cells the sweep has."""
        new = self._new_roots(sweep.jobs)
        for root in new:
            manifest.claim(root / self._folder.name, "storage.root")
        names, overrides = _asked_for(sweep.jobs)
        storage = sorted([*map(str, new), *self._record.storage])
        self._record = replace(self._record, cells=names, storage=storage, overrides=overrides)
        self._record.write(self._folder)

    def _new_roots(self, jobs: Sequence[job.Job]) -> list[Path]:
        """The folders of `storage.root` in which the sweep has none of its own yet."""
        roots = {str(Path(root).resolve()) for job in jobs if (root := job.config.storage.root)}
        return [Path(root) for root in sorted(roots.difference(self._record.storage))]

    def _print(self, sentence: str) -> None:
        self._console.print(text_of(sentence), soft_wrap=True)

    def _show(self, *ways: Callable[[Path], None]) -> None:
        """Show the rows in these ways; what cannot be written is told, since the rows themselves decide."""
        for way in ways:
            try:
                way(self._folder)
            except ResultsError as error:
                self._print(str(error))

    def _end(self, sweep: driver.Sweep, status: int) -> int:
        try:
            sweep.end()
            told = None if self._broken_off else sweep.log.settle([job.cell.name for job in sweep.jobs])
            if told:
                self._print(told)
        except ResultsError as error:
            self._broken_off = self._broken_off or error
        if self._broken_off:
            no_room = isinstance(self._broken_off, ResultsError) and self._broken_off.no_room
            room = "make room, and " if no_room else ""
            self._print(f"broken off: {self._broken_off}; {room}go on with resume={self._folder}")
            return 1
        rows = list(sweep.log.rows.values())
        whole = len(rows) == len(sweep.jobs)
        if status == INTERRUPTED or not whole:
            why = "interrupted: " if status == INTERRUPTED else ""
            self._print(f"{why}{len(rows)} of {len(sweep.jobs)} cells have a row")
        if rows:
            from dcpbench.analysis.history_rows import sweep_before
            from dcpbench.report.show import print_report, write_reports

            self._show(write_csv)
            before = sweep_before(self._folder)
            self._show(partial(write_reports, place=before), print_report)
            if not self._part and all(row.status == "skip" for row in rows):
                self._print("every cell was skipped: nothing was measured")
            spent_s = time.monotonic() - self._started
            self._print(f"{counted(sweep.written, 'cell')} in {spent_s:.1f} s, written to {self._folder}")
            for sentence in next_steps.sentences(self._folder, before, whole):
                self._print(sentence)
            if self._part:
                self._print(f"part={self._base.part}: {parts.progress(self._folder.parent)}")
                self._print(f"next: {next_steps.command('report', self._folder.parent)}")
        if self._part:  # others may have what is no skip
            return status or int(not whole or not all(row.is_ok for row in rows))
        return status or (exit_status(rows) if whole else 1)


def _of_the_cell(overrides: Sequence[str]) -> list[str]:
    """The overrides of a job without those about the whole sweep, which other sweepers pass on."""
    return [item for item in overrides if not is_about_the_sweep(item.partition("=")[0])]


def _asked_for(jobs: Sequence[job.Job]) -> tuple[list[str], dict[str, list[str]]]:
    """The names of the cells, and the overrides of each."""
    return [one.cell.name for one in jobs], {one.cell.name: one.cell.overrides for one in jobs}


def _refuse_what_needs_all_cells(base: DictConfig, sweeper: str) -> None:
    """Refuse what another sweeper than dcpbench's own cannot do, or not without an objective."""
    for key, null in (("resume", None), ("plan", False), (REPEATS, 1), (MATRIX, "product"), (PART, None)):
        if base[key] != null:
            value = str(base[key]).lower() if key == "plan" else base[key]
            why = f"as with hydra/sweeper=dcpbench and not with hydra/sweeper={sweeper}"
            raise ConfigError(f"{key}={value}: needs to know all cells before the first one runs, {why}")
    if base.objective is None and sweeper != "basic":
        why = "is returned a number for each cell: name the metric"
        raise ConfigError(f"objective=null: hydra/sweeper={sweeper} {why}")


def _resumed(base: DictConfig, folder: Path) -> manifest.Record | None:
    """The record of the sweep to go on with, if one is; refuses `resume` and `rerun` that make no sense."""
    if base.resume is None:
        for key, null in (("rerun", Rerun.none), ("trust", False)):
            if base[key] != null:
                value = str(base[key]).lower()
                raise ConfigError(f"{key}={value}: says what to do with resume=<folder>, which is not set")
        return None
    if not str(base.resume):
        raise ConfigError("resume=: names no folder")
    if Path(str(base.resume)).resolve() != folder:
        raise ConfigError(f"resume={base.resume}: hydra.sweep.dir={folder} is another folder")
    record = manifest.read(folder)
    if not base.trust:
        record.refuse_foreign(folder)
    parts.refuse_whole(folder)
    return record
