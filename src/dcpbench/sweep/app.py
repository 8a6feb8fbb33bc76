"""Run a sweep: from Hydra's overrides to its printed table. It begins, is resumed, or is only planned."""

import math
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import cast

from hydra.core.config_loader import ConfigLoader
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console

from dcpbench.config.errors import ConfigError
from dcpbench.config.groups import Device, ExecutorConfig, StageWorld
from dcpbench.config.mesh import dp_degree
from dcpbench.config.schema import MATRIX, PART, REPEATS, Config, is_about_the_sweep
from dcpbench.config.text import counted
from dcpbench.core.metrics import METRICS
from dcpbench.executors import fork_server
from dcpbench.executors.base import Engine, HostsLostError, engine_of
from dcpbench.executors.fork_server import Machine
from dcpbench.rank.nccl import NCCL_PATH
from dcpbench.records.row import Row
from dcpbench.records.store import ResultsError, RowLog
from dcpbench.report.styles import text_of
from dcpbench.sweep import cells, driver, dry_run, job, pairwise, resume, validity
from dcpbench.sweep.closing import close
from dcpbench.sweep.progress import composing, start_sentence
from dcpbench.sweep.resources import shared_gpu_sentences
from dcpbench.sweep.sweep_folder import SweepFolder

_MANY = 50
"""With more cells composing takes seconds, so progress is also written to files."""
_MAXIMIZES = {"direction": "maximize", "optim.maximize": "true", "ax_config.experiment.minimize": "false"}
"""How the configurations of Hydra's Optuna, Nevergrad and Ax sweepers specify that they maximize."""


class SweepRun:
    """One sweep in one folder: a sequence of batches of cells, whichever sweeper hands them over.

    dcpbench's own sweeper hands over one batch, and the folder is claimed once all its cells are valid.
    Other sweepers write into the folder before their first batch, so for them it is claimed at once.

    A wrong configuration raises ConfigError, hydra.errors.HydraException or
    omegaconf.errors.OmegaConfBaseException before a cell of the batch is started.
    """

    def __init__(self, loader: ConfigLoader, base: DictConfig, own_sweeper: bool) -> None:
        """Decide all that can be decided before the first batch.

        Args:
            base: the composition of the sweep itself; `loader` composes its cells.
            own_sweeper: whether dcpbench's own sweeper drives the sweep.
        """
        self._base = base
        self.sweeper = str(base.hydra.runtime.choices["hydra/sweeper"])
        self.is_left_to_sweeper = not own_sweeper
        """Whether another sweeper is running, before, between and after batches."""
        self._value_of = objective_of(base)
        if not own_sweeper:
            _refuse_what_needs_all_cells(base, self.sweeper)
        # Not by FORCE_COLOR, which notebooks and CI set: a progress bar needs a terminal.
        self._console = Console(stderr=True, force_terminal=sys.stderr.isatty())
        self._engine: Engine | None = None
        self._machine: Machine | None = None
        self._driver: driver.Sweep | None = None
        self._planned = 0
        self._folder = SweepFolder(base)
        self._cells = cells.CellMaker(loader, base, composing(self._console))
        if not own_sweeper or (self._folder.is_resumed and not base.plan):
            self._folder.claim()

    @property
    def recorded(self) -> tuple[list[str], list[list[str]]] | None:
        """What the record of a resumed sweep has, see `SweepFolder.recorded`."""
        return self._folder.recorded

    @property
    def begun(self) -> bool:
        """Whether a cell may have run."""
        return self._driver is not None

    def run(self, batch: Sequence[Sequence[str]], blocks: Sequence[str] = ()) -> list[float | None]:
        """Run the cells of a batch that have no row yet, and return the value of the objective for each. A
        plan groups cells by these blocks, if there are any.

        Raises:
            SystemExit: a row could not be written.
        """
        self.is_left_to_sweeper, sweepers_turn = False, self.is_left_to_sweeper
        if not batch:
            raise ConfigError(f"hydra/sweeper={self.sweeper}: asks for no cell")
        words = [_of_the_cell(overrides) for overrides in batch]
        engine = self._begun_engine(words)
        if not self.begun and len(words) > _MANY:
            self._print(f"{counted(len(words), 'cell')}: {'planning' if self._base.plan else 'composing'}")
        made = self._cells.cells(words)
        is_announced = self.begun or self._announced(made, engine)
        machine = self._probed(engine)
        jobs = self._folder.named(job.plan(made, machine), partial(self._config_of, machine=machine))
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
            with self._console.status("building the workloads once"):  # on a terminal
                mine = _with_errors(mine, machine, found.done if found else ())
            self._folder.begin(mine, jobs, found)
            self._driver = self._begun_driver(mine, machine, engine, found)
            left = [one for one in mine if not found or one.cell.name not in found.done]
            if left and not is_announced:
                self._print(start_sentence(left, self._folder.path))
        try:
            self._driver.run(mine)
        except (ResultsError, HostsLostError) as error:
            self._driver.interrupted_by = error
            sys.exit(1)
        self.is_left_to_sweeper = sweepers_turn
        rows = self._driver.log.rows
        return [self._value_of(rows.get(one.cell.name)) for one in jobs]

    def _announced(self, made: Sequence[cells.SweepCell], engine: Engine) -> bool:
        """Print the first line before torch is imported, and return whether that was possible: not where the
        machine, the rows so far or the user's code decide what runs, or refuse it in one line."""
        folder, base, configs = self._folder, self._base, [one.config for one in made]
        other = base.plan or base.nccl or folder.is_resumed or folder.part or len(made) > _MANY
        machine = engine.assumed(all(config.device is Device.cpu for config in configs))
        if machine is None or other or any(config.workload.target for config in configs):
            return False
        try:
            jobs = job.plan(made, machine)
            folder.refuse_unusable(jobs)
        except ConfigError:  # reported once the machine is known
            return False
        self._print(start_sentence(jobs, folder.path))
        return True

    def covering(self, lists: Sequence[Sequence[str]]) -> list[pairwise.Row]:
        """Return jobs with every two values of these lists that can run together; print the rest."""
        machine = self._probed(self._begun_engine(lists))
        runnable = pairwise.Runnable(self._cells.composer, machine, lists)
        found = pairwise.covering(lists, runnable.runs, runnable.excludes)
        self._print(pairwise.sentence(lists, found))
        return found.rows

    def end(self, status: int, began: float) -> int:
        """End the sweep, report its rows, release its folder, and return the exit status.

        Args:
            status: the exit status so far; 0 if only the rows decide it.
            began: when its command began, of `time.monotonic`.
        """
        try:
            if self._driver:
                return close(self._driver, self._folder, status, began, self._print)
            return status or self._planned
        finally:
            self._folder.release(self.begun)
            if not self.begun:  # it would still import torch
                fork_server.end_server()

    def _begun_engine(self, batch: Sequence[Sequence[str]]) -> Engine:
        """Return the engine of the ranks; it imports what they need while cells are composed."""
        if self._engine is None:
            compiles = cells.may_compile(self._base, batch)
            if self._base.nccl:
                os.environ[NCCL_PATH] = str(Path(self._base.nccl).resolve())
            self._engine = engine_of(cast(ExecutorConfig, OmegaConf.to_object(self._base.executor)))
            self._engine.begin([] if self._base.plan else fork_server.rank_imports(compiles))
        return self._engine

    def _probed(self, engine: Engine) -> Machine:
        """Return the machine, which is asked once, for all blocks and batches."""
        if self._machine is None:
            with self._console.status("importing torch for the ranks"):  # on a terminal
                self._machine = engine.probe()
        return self._machine

    def _begun_driver(
        self, jobs: list[job.Job], machine: Machine, engine: Engine, found: resume.Found | None
    ) -> driver.Sweep:
        """Return the driver of the jobs, and import meanwhile what shows their rows."""
        folder = self._folder.path
        earlier = resume.earlier_machines(folder, job.environment_of(machine, jobs))
        # pandas takes up to a second to import, which the driver has while the ranks are at work.
        threading.Thread(target=import_module, args=("dcpbench.report.show",), daemon=True).start()
        log = RowLog(folder, found.standing if found else None)
        return driver.Sweep(folder, jobs, machine, engine, self._console, log, earlier)

    def _config_of(self, words: Sequence[str], machine: Machine) -> Config | None:
        """Return the decided configuration of a cell, None if its words are wrong here."""
        with suppress(ConfigError, HydraException, OmegaConfBaseException):
            return validity.resolve(self._cells.composer.config(words), machine)
        return None

    def _show_plan(
        self, jobs: list[job.Job], blocks: Sequence[str], machine: Machine, found: resume.Found | None
    ) -> int:
        """Print what would run, and start nothing; return the exit status so far."""
        self._folder.refuse_unusable(jobs)
        machine.complete()
        asked = machine.gpus, found, self._base.plan_as
        return dry_run.print_plan(self._folder.path, jobs, blocks, *asked)

    def _print(self, sentence: str) -> None:
        self._console.print(text_of(sentence), soft_wrap=True)


def _with_errors(jobs: Sequence[job.Job], machine: Machine, done: Container[str]) -> list[job.Job]:
    """Import and build each workload in a process like a rank, before the first cell runs, and return the
    jobs, with the errors of their workloads.

    Args:
        done: names of cells that do not run again.

    Raises:
        ConfigError: ranks cannot import or call one.
    """
    configs: defaultdict[str, dict[str, Config]] = defaultdict(dict)
    for one in jobs:
        config = one.config
        if one.skip or one.cell.name in done or not config.workload.target:
            continue
        configs[str(config.workload.target)].setdefault(_use_of_target(config), config)
    errors: dict[str, str | None] = {}
    for target, of_target in configs.items():
        found = machine.target_errors([*of_target.values()])
        if found.unusable:
            raise ConfigError(f"workload.target={target}: {found.unusable}")
        errors |= zip(of_target, found.of_cells, strict=False)
    return [one if one.skip else replace(one, error=errors.get(_use_of_target(one.config))) for one in jobs]


def _use_of_target(config: Config) -> str:
    """Return what the errors of a workload depend on: its options, and the worlds that share its batches."""
    worlds = [config.world_of(world) for world in (StageWorld.save, StageWorld.load)]
    degrees = [(size, dp_degree(parallel.mesh_sizes(size))) for parallel, size in worlds]
    return f"{config.workload} {config.own_trainer} {config.device} {degrees}"


def objective_of(base: DictConfig) -> Callable[[Row | None], float | None]:
    """Return a function from a row to the value of the sweep's `objective`; its values are None without one.

    The value is infinitely bad if there is no row, it is not ok, or the metric is null. The Optuna sweeper
    would abandon a study for NaN or an exception.
    """
    metric = base.objective
    if metric is not None and metric not in METRICS:
        raise ConfigError(f"objective={metric}: unknown metric; choose one of {', '.join(METRICS)}")
    sweeper = base.hydra.sweeper  # whose setting is an Enum, a text or a flag
    given = ((OmegaConf.select(sweeper, key), value) for key, value in _MAXIMIZES.items())
    maximizes = any(getattr(setting, "name", str(setting)).lower() == value for setting, value in given)
    worst = -math.inf if maximizes else math.inf

    def value_of(row: Row | None) -> float | None:
        if metric is None:
            return None
        value = row.metrics.get(metric) if row is not None and row.is_ok else None
        return worst if value is None else float(value)

    return value_of


def _blocks_of(mine: Sequence[job.Job], jobs: Sequence[job.Job], blocks: Sequence[str]) -> list[str]:
    """Return the block of each of some of all jobs, if an experiment names blocks."""
    names = {one.cell.name for one in mine}
    return [block for block, one in zip(blocks, jobs, strict=bool(blocks)) if one.cell.name in names]


def _of_the_cell(words: Sequence[str]) -> list[str]:
    """Return the words of a job without those about the sweep, which other sweepers pass on."""
    return [item for item in words if not is_about_the_sweep(item.partition("=")[0])]


def _refuse_what_needs_all_cells(base: DictConfig, sweeper: str) -> None:
    """Refuse what only dcpbench's own sweeper can do, and another sweeper without an objective."""
    for key, null in (("resume", None), ("plan", False), (REPEATS, 1), (MATRIX, "product"), (PART, None)):
        if base[key] != null:
            value = str(base[key]).lower() if key == "plan" else base[key]
            raise ConfigError(
                f"{key}={value}: needs all cells before the first one runs; use hydra/sweeper=dcpbench, not "
                f"hydra/sweeper={sweeper}"
            )
    if base.objective is None and sweeper != "basic":
        raise ConfigError(
            f"objective=null: hydra/sweeper={sweeper} needs a number for each cell; name a metric"
        )
