"""Run a sweep: from Hydra's overrides to its printed table. It begins, is resumed, or is only planned."""

import os
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import cast

from hydra.core.config_loader import ConfigLoader
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from dcpbench.config.errors import ConfigError
from dcpbench.config.groups import ExecutorConfig
from dcpbench.config.schema import Config
from dcpbench.config.text import counted
from dcpbench.executors import fork_server
from dcpbench.executors.base import Engine, HostsLostError, engine_of
from dcpbench.executors.fork_server import Machine
from dcpbench.rank.nccl import NCCL_PATH
from dcpbench.records.row import INTERRUPTED
from dcpbench.records.store import ResultsError, RowLog
from dcpbench.report.styles import text_of
from dcpbench.sweep import cells, driver, dry_run, manifest, pairwise
from dcpbench.sweep.closing import close
from dcpbench.sweep.folder import SweepFolder
from dcpbench.sweep.plan import Plan, part_numbers, part_of, plan_of
from dcpbench.sweep.progress import cells_sentence, ranks_sentence
from dcpbench.sweep.resources import shared_gpu_sentences
from dcpbench.sweep.signals import Signals, interrupted
from dcpbench.sweep.valid_rows import ValidRows

_MANY = 50
"""With more cells composing takes seconds, so progress is also written to files."""

Cells = tuple[Sequence[Sequence[str]], Sequence[str]]
"""The words of each cell, and its block if the sweep has blocks."""


def run_sweep(
    signals: Signals,
    began: float,
    loader: ConfigLoader,
    base: DictConfig,
    cells_of: "Callable[[SweepRun], Cells]",
) -> int:
    """Run a sweep to its end, whatever ends it. Return the exit status.

    Args:
        began: when its command began, of `time.monotonic`.
        base: the composition of the sweep itself; `loader` composes its cells.
        cells_of: returns the cells, which can depend on the machine and on the folder of a resumed sweep.
    """
    signals.check()  # Hydra takes some exceptions for an answer
    sweep = SweepRun(loader, base)
    status = 1  # of an unexpected exception, whose traceback follows the table
    try:
        status = sweep.run(*cells_of(sweep))
    except KeyboardInterrupt:
        status = INTERRUPTED
        if not sweep.begun:
            sys.stderr.write(interrupted(sweep.folder.path))
    finally:
        signals.hold()
        status = sweep.end(status, began)
    return status


class SweepRun:
    """One sweep in one folder, which is claimed once all its cells are valid.

    A wrong configuration raises ConfigError, hydra.errors.HydraException or
    omegaconf.errors.OmegaConfBaseException before a cell is started.
    """

    def __init__(self, loader: ConfigLoader, base: DictConfig) -> None:
        """Decide all that can be decided before the cells are known.

        Args:
            base: the composition of the sweep itself; `loader` composes its cells.
        """
        self._base = base
        # Not by FORCE_COLOR, which notebooks and CI set: a progress bar needs a terminal.
        self._console = Console(stderr=True, force_terminal=sys.stderr.isatty())
        self._engine: Engine | None = None
        self._machine: Machine | None = None
        self._driver: driver.Sweep | None = None
        record, is_resumed = manifest.record_of(base)
        self.recorded = manifest.words_of_cells(record) if is_resumed else None
        self._part = part_numbers(base.part) if base.part and not is_resumed else None
        self.folder = SweepFolder(Path(str(base.hydra.sweep.dir)).resolve(), record, is_resumed)
        self._cells = cells.CellMaker(loader, base)
        if is_resumed and not base.plan:
            self.folder.hold()

    @property
    def begun(self) -> bool:
        """Whether a cell may have run."""
        return self._driver is not None

    def run(self, words: Sequence[Sequence[str]], blocks: Sequence[str] = ()) -> int:
        """Run the cells with these words that have no row yet. A plan groups cells by these blocks, if there
        are any. Return the exit status, 0 if it depends on the rows alone.
        """
        engine = self._begun_engine(words)
        if len(words) > _MANY:
            self._print(f"{counted(len(words), 'cell')}: {'planning' if self._base.plan else 'composing'}")
        made = self._cells.cells(words, blocks, self.recorded)
        is_announced = self._announced(made)
        machine = self._probed(engine)
        plan = plan_of(made, machine, engine.hosts_of)
        plan = replace(plan, cells=part_of(plan.cells, *self._part)) if self._part else plan
        valid = self.folder.valid_rows(plan.cells, self._base.rerun)
        if self._base.plan:
            self.folder.refuse_unusable(plan.cells)
            machine.description.update(engine.details())
            return dry_run.print_plan(plan, self.folder.path, valid, self._base.plan_as)
        for sentence in (*valid.sentences(len(plan.cells)), *shared_gpu_sentences(plan)):
            self._print(sentence)
        left = replace(plan, cells=[cell for cell in plan.cells if cell.run not in valid.lines])
        with self._console.status("importing the workloads"):  # on a terminal
            _refuse_unusable_targets(left, engine)
        for sentence in self.folder.begin(plan.cells, valid, self._base):
            self._print(sentence)
        self._driver = self._begun_driver(plan, engine, valid)
        if left.cells and not is_announced:
            self._print(cells_sentence(left, self.folder.path))
        if left.cells:
            self._print(ranks_sentence(left))
        try:
            self._driver.run()
        except (ResultsError, HostsLostError) as error:
            self._driver.interrupted_by = error
            return 1
        return 0

    def _announced(self, made: Sequence[cells.SweepCell]) -> bool:
        """Print the first line before torch is imported, and return whether that was possible: not where the
        rows so far or the user's code decide what runs, nor for cells that need a GPU."""
        base, targets = self._base, {one.config.workload.target for one in made}
        if base.plan or base.nccl or base.resume or base.part or len(made) > _MANY or targets != {None}:
            return False
        with suppress(ConfigError):  # reported once the machine is known
            plan = plan_of(made, Machine(0, {"torch": "0"}, has_interpreters=True))
            self.folder.refuse_unusable(plan.cells)
            self._print(cells_sentence(plan, self.folder.path))
            return True
        return False

    def covering(self, lists: Sequence[Sequence[str]]) -> list[pairwise.Row]:
        """Return jobs with every two values of these lists that can run together; print the rest."""
        engine = self._begun_engine(lists)
        runnable = pairwise.Runnable(self._cells.composer, self._probed(engine), engine.hosts_of, lists)
        found = pairwise.Search(lists, runnable.runs, runnable.excludes).found()
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
                return close(self._driver, bool(self._base.part), status, began, self._print)
            return status
        finally:
            self.folder.release()

    def _begun_engine(self, batch: Sequence[Sequence[str]]) -> Engine:
        """Return the engine of the ranks; it imports what they need while cells are composed."""
        if self._engine is None:
            compiles = cells.may_compile(self._base, batch)
            if self._base.nccl:
                fork_server.end_server()  # one that has begun to import torch's own
                os.environ[NCCL_PATH] = str(Path(self._base.nccl).resolve())
            self._engine = engine_of(cast(ExecutorConfig, OmegaConf.to_object(self._base.executor)))
            self._engine.begin([] if self._base.plan else fork_server.rank_imports(compiles))
        return self._engine

    def _probed(self, engine: Engine) -> Machine:
        """Return the machine, which is asked once, for all blocks."""
        if self._machine is None:
            with self._console.status("importing torch for the ranks"):  # on a terminal
                self._machine = engine.probe()
        return self._machine

    def _begun_driver(self, plan: Plan, engine: Engine, valid: ValidRows) -> driver.Sweep:
        """Return the driver of the cells, and import meanwhile what shows their rows."""
        folder = self.folder.path
        earlier = self.folder.earlier_machines(plan.environment)
        # pandas takes up to a second to import, which the driver has while the ranks are at work.
        threading.Thread(target=import_module, args=("dcpbench.report.show",), daemon=True).start()
        log = RowLog(folder, valid.rows)
        return driver.Sweep(folder, plan, engine, self._console, log, earlier)

    def _print(self, sentence: str) -> None:
        self._console.print(text_of(sentence), soft_wrap=True)


def _refuse_unusable_targets(plan: Plan, engine: Engine) -> None:
    """Import each `workload.target` in a process like a rank's, before the first cell runs.

    Raises:
        ConfigError: ranks cannot import or call one.
    """
    calls: defaultdict[str, dict[str, Config]] = defaultdict(dict)
    for cell in plan.cells:
        config = cell.config
        if config.workload.target and not cell.skip:
            calls[config.workload.target][f"{config.workload} {config.own_trainer} {config.device}"] = config
    for target, configs in calls.items():
        if error := engine.target_error([*configs.values()]):
            raise ConfigError(f"workload.target={target}: {error}")
