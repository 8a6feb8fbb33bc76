"""A sweep from Hydra's overrides to its printed table: begun, resumed, or only planned."""

import os
import sys
import threading
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import cast

from hydra.core.config_loader import ConfigLoader
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from dcpbench.config.errors import ConfigError
from dcpbench.config.groups import ExecutorConfig
from dcpbench.config.schema import MATRIX, PART, REPEATS, is_about_the_sweep
from dcpbench.config.text import counted
from dcpbench.executors import fork_server
from dcpbench.executors.base import Engine, HostsLostError, engine_of
from dcpbench.executors.fork_server import Machine
from dcpbench.rank.nccl import NCCL_PATH
from dcpbench.records.row_log import RowLog
from dcpbench.records.store import ResultsError
from dcpbench.report.styles import text_of
from dcpbench.sweep import cells, driver, dry_run, job, pairwise, resume
from dcpbench.sweep.closing import close
from dcpbench.sweep.progress import composing
from dcpbench.sweep.resources import shared_gpu_sentences
from dcpbench.sweep.runnable import Runnable
from dcpbench.sweep.sweep_folder import SweepFolder
from dcpbench.sweep.task import objective_of

_MANY = 50
"""Of more cells a file is told too that they are being composed, which takes seconds."""


class SweepRun:
    """One sweep in one folder: a sequence of batches of cells, whichever sweeper hands them over.

    dcpbench's own sweeper hands over one batch, and the folder is claimed when all its cells are right.
    Other sweepers write into the folder before their first batch, so for them it is claimed at once.
    """

    def __init__(self, loader: ConfigLoader, base: DictConfig, own_sweeper: bool) -> None:
        """Decide what can be decided before the first batch.

        Args:
            base: the composition of the sweep itself; `loader` composes its cells.
            own_sweeper: whether the sweep is driven by dcpbench's own sweeper.

        Raises:
            ConfigError: a key that is about the sweep is wrong, or the folder cannot be used.
        """
        self._base = base
        self.sweeper = str(base.hydra.runtime.choices["hydra/sweeper"])
        self.is_left_to_sweeper = not own_sweeper
        """Whether another sweeper than dcpbench's own is at work, before, between and after batches."""
        self._value_of = objective_of(base)
        if not own_sweeper:
            _refuse_what_needs_all_cells(base, self.sweeper)
        self._cells = cells.CellMaker(loader, base)
        self._console = Console(stderr=True)
        self._engine: Engine | None = None
        self._driver: driver.Sweep | None = None
        self._planned = 0
        self._folder = SweepFolder(base)
        if not own_sweeper or (self._folder.is_resumed and not base.plan):
            self._folder.claim()

    @property
    def begun(self) -> bool:
        """Whether a cell may have run."""
        return self._driver is not None

    def run(self, batch: Sequence[Sequence[str]], blocks: Sequence[str] = ()) -> list[float | None]:
        """Run the cells of a batch that have no row yet; the value of the objective for each. A plan puts
        cells together by these blocks, if there are any.

        Raises:
            ConfigError, hydra.errors.HydraException, omegaconf.errors.OmegaConfBaseException: the
                configuration is wrong; nothing of this batch was started.
            SystemExit: a row could not be written.
        """
        self.is_left_to_sweeper, sweepers_turn = False, self.is_left_to_sweeper
        if not batch:
            raise ConfigError(f"hydra/sweeper={self.sweeper}: asks for no cell")
        words = [_of_the_cell(overrides) for overrides in batch]
        engine = self._begun_engine(words)
        if not self.begun and (self._console.is_terminal or len(words) > _MANY):  # else a rank runs at once
            doing = "planning" if self._base.plan else "starting ranks"
            self._print(f"{counted(len(words), 'cell')}: {doing} ...")
        with composing(self._console) as track:
            made = self._cells.cells(words, track)
        machine = self._driver.machine if self._driver else engine.probe()
        jobs = job.plan(made, machine)
        mine = self._folder.mine(jobs)
        if self._driver:
            self._driver.jobs += mine
            self._folder.describe(self._driver.jobs)
        else:
            found = self._folder.found(mine)
            if self._base.plan:
                self._planned = self._show_plan(mine, _blocks_of(mine, jobs, blocks), machine, found)
                return [self._value_of(None) for _ in jobs]
            for sentence in found.sentences(len(mine)) if found else ():
                self._print(sentence)
            for sentence in shared_gpu_sentences(mine, machine):
                self._print(sentence)
            self._folder.begin(mine, jobs, found)
            self._driver = self._begun_driver(mine, machine, engine, found)
        try:
            self._driver.run(mine)
        except (ResultsError, HostsLostError) as error:
            self._driver.interrupted_by = error
            sys.exit(1)
        self.is_left_to_sweeper = sweepers_turn
        rows = self._driver.log.rows
        return [self._value_of(rows.get(one.cell.name)) for one in jobs]

    def covering(self, lists: Sequence[Sequence[str]]) -> list[pairwise.Row]:
        """Jobs in which every two values of these lists meet that can run together; what is left out is told.

        Raises:
            ConfigError, hydra.errors.HydraException, omegaconf.errors.OmegaConfBaseException: an override
                is wrong.
        """
        machine = self._begun_engine(lists).probe()
        with composing(self._console) as track:
            runnable = Runnable(self._cells.composer, machine, lists, track)
        found = pairwise.covering(lists, runnable.runs, runnable.excludes)
        self._print(pairwise.sentence(lists, found))
        return found.rows

    def end(self, status: int) -> int:
        """End the sweep, report its rows, and give its folder up.

        Args:
            status: the exit status as far as it is known, 0 if it depends on the rows alone.

        Returns:
            the exit status.
        """
        try:
            if self._driver:
                return close(self._driver, self._folder, status, self._print)
            return status or self._planned
        finally:
            self._folder.release(self.begun)

    def _begun_engine(self, batch: Sequence[Sequence[str]]) -> Engine:
        """Where ranks will live; it imports what they need while cells are composed."""
        if self._engine is None:
            compiles = cells.may_compile(self._base, batch)
            if self._base.nccl:
                os.environ[NCCL_PATH] = str(Path(self._base.nccl).resolve())
            self._engine = engine_of(cast(ExecutorConfig, OmegaConf.to_object(self._base.executor)))
            self._engine.begin([] if self._base.plan else fork_server.rank_imports(compiles))
        return self._engine

    def _begun_driver(
        self, jobs: list[job.Job], machine: Machine, engine: Engine, found: resume.Found | None
    ) -> driver.Sweep:
        """What runs the jobs, and imports meanwhile what shows their rows."""
        folder, now = self._folder.path, machine.description | {"git_commit": jobs[0].columns["git_commit"]}
        earlier = resume.earlier_machines(folder, now)
        # pandas takes up to a second to import, which the driver has while the ranks are at work.
        threading.Thread(target=import_module, args=("dcpbench.report.show",), daemon=True).start()
        log = RowLog(folder, found.standing if found else ())
        return driver.Sweep(folder, jobs, machine, engine, self._console, log, earlier)

    def _show_plan(
        self, jobs: list[job.Job], blocks: Sequence[str], machine: Machine, found: resume.Found | None
    ) -> int:
        """Print what would run, and start nothing; the exit status as far as it is known."""
        self._folder.refuse_unusable(jobs)
        machine.complete()
        as_asked = machine.gpus, found, self._base.plan_as
        return dry_run.print_plan(self._folder.path, jobs, blocks, *as_asked)

    def _print(self, sentence: str) -> None:
        self._console.print(text_of(sentence), soft_wrap=True)


def _blocks_of(mine: Sequence[job.Job], jobs: Sequence[job.Job], blocks: Sequence[str]) -> list[str]:
    """The blocks that ask for some of all jobs, if an experiment names blocks."""
    names = {one.cell.name for one in mine}
    return [block for block, one in zip(blocks, jobs, strict=bool(blocks)) if one.cell.name in names]


def _of_the_cell(words: Sequence[str]) -> list[str]:
    """The words of a job without those about the sweep itself, which other sweepers pass on."""
    return [item for item in words if not is_about_the_sweep(item.partition("=")[0])]


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
