"""Run a sweep: from a request to its printed table. It begins, is resumed, or is only planned."""

import os
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path

from omegaconf import OmegaConf
from rich.console import Console

from dcpbench.compose.blocks import words_of_cells
from dcpbench.compose.cells import SweepCell, cells_of
from dcpbench.compose.composer import Composer
from dcpbench.config.errors import ConfigError
from dcpbench.config.schema import Config
from dcpbench.config.text import counted
from dcpbench.executors.agent import end_own_agent
from dcpbench.executors.base import Engine, HostsLostError, engine_of
from dcpbench.executors.machine import Machine, rank_imports
from dcpbench.plan.plan import Plan, cells_of_part, part_numbers, plan_of
from dcpbench.rank.nccl import NCCL_PATH
from dcpbench.records.row import INTERRUPTED, shared_gpu_sentences
from dcpbench.records.store import ResultsError
from dcpbench.sweep.driver import SweepDriver
from dcpbench.sweep.folder import SweepFolder
from dcpbench.sweep.progress import cells_sentence, print_sentences, ranks_sentence
from dcpbench.sweep.request import Request
from dcpbench.sweep.signals import interrupted

_MANY = 50
"""With more cells composing takes seconds, so progress is also written to files."""


def run_sweep(request: Request) -> int:
    """Run, resume or plan a sweep to its end, whatever ends it. Return the exit status.

    A wrong configuration raises ConfigError, hydra.errors.HydraException or
    omegaconf.errors.OmegaConfBaseException before a cell is started.
    """
    request.signals.check()  # Hydra takes some exceptions for an answer
    # Not by FORCE_COLOR, which notebooks and CI set: a progress bar needs a terminal.
    console = Console(stderr=True, force_terminal=sys.stderr.isatty())
    sweep, status = None, 1  # of an unexpected exception, whose traceback follows the table
    with SweepFolder(request.folder, request.record) as folder:
        try:
            if request.is_resumed and not request.options.plan:
                folder.hold()
            engine = _begun_engine(request)
            cells, probe = _cells(request, engine, console)
            plan = plan_of(cells, probe(), engine.hosts_of)
            if request.sweep.part and not request.is_resumed:
                plan = replace(plan, cells=cells_of_part(plan.cells, *part_numbers(request.sweep.part)))
            if request.options.plan:
                return _show(plan, request, engine, folder)
            sweep = _begun_sweep(plan, request, engine, folder, console)
            sweep.run()
            status = 0
        except (ResultsError, HostsLostError) as error:
            if not sweep:
                raise
            sweep.interrupted_by = error
        except KeyboardInterrupt:
            status = INTERRUPTED
            if not sweep:
                sys.stderr.write(interrupted(folder.path))
        finally:
            request.signals.hold()
            if sweep:
                status = sweep.close(bool(request.sweep.part), status, request.began)
    return status


def _begun_engine(request: Request) -> Engine:
    """Return the engine of the ranks; it imports what they need while cells are composed."""
    if request.sweep.part:
        part_numbers(request.sweep.part)
    if request.sweep.nccl:
        end_own_agent()  # one that has begun to import torch's own
        os.environ[NCCL_PATH] = str(Path(request.sweep.nccl).resolve())
    engine = engine_of(OmegaConf.to_object(request.base.executor))  # type: ignore[arg-type]
    engine.begin([] if request.options.plan else rank_imports(request.may_compile))
    return engine


def _cells(
    request: Request, engine: Engine, console: Console
) -> tuple[list[SweepCell], Callable[[], Machine]]:
    """Return the cells of a request, and a function that describes the machine, which is probed once."""
    composer = Composer(request.loader, request.base)

    @cache
    def probe() -> Machine:
        with console.status("importing torch for the ranks"):  # on a terminal
            return engine.probe()

    def covering(lists: Sequence[Sequence[str]]) -> Sequence[Sequence[str]]:
        from dcpbench.compose import pairwise

        pair_cover = pairwise.covering(composer, probe(), engine.hosts_of, lists)
        print_sentences(console, pairwise.sentence(lists, pair_cover))
        return pair_cover.rows

    if request.is_resumed:
        words = request.recorded
    else:
        words = words_of_cells(request.overrides, request.loader, request.base, covering)
    if len(words) > _MANY:
        doing = "planning" if request.options.plan else "composing"
        print_sentences(console, f"{counted(len(words), 'cell')}: {doing}")
    return cells_of(composer, request.base, words), probe


def _show(plan: Plan, request: Request, engine: Engine, folder: SweepFolder) -> int:
    """Print what would run, and return the exit status."""
    from dcpbench.sweep.dry_run import print_plan

    valid = folder.valid_rows(plan.cells, request.options.rerun_failed)
    folder.refuse_unusable(plan.cells)
    plan.machine.description.update(engine.details())
    return print_plan(plan, folder.path, valid, request.options)


def _begun_sweep(
    plan: Plan, request: Request, engine: Engine, folder: SweepFolder, console: Console
) -> SweepDriver:
    """Begin or resume a sweep in its folder. Return its driver, and import meanwhile what shows its rows."""
    valid = folder.valid_rows(plan.cells, request.options.rerun_failed)
    left = replace(plan, cells=[cell for cell in plan.cells if cell.run not in valid.lines])
    shared = shared_gpu_sentences((cell.columns for cell in plan.cells), [plan.machine.nccl])
    print_sentences(console, *valid.sentences(len(plan.cells)), *shared)
    with console.status("importing the workloads"):  # on a terminal
        _refuse_unusable_targets(left, engine)
    print_sentences(console, *folder.begin(plan.cells, valid, request.base))
    earlier = folder.earlier_machines(plan.environment)
    # pandas takes up to a second to import, which the driver has while the ranks are at work.
    threading.Thread(target=import_module, args=("dcpbench.report.show",), daemon=True).start()
    if left.cells:
        print_sentences(console, cells_sentence(left, folder.path), ranks_sentence(left))
    return SweepDriver(folder.path, plan, engine, console, valid.rows, earlier)


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
