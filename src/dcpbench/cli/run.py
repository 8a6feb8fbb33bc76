"""Run a sweep by Hydra's overrides.

Exit status 0: every row is pass, xfail or skip. 1: a row is not, or all were skipped. 2: the configuration is
wrong, which one line reports, and nothing was started. 128 + the number of a signal that ended it (130:
Ctrl-C).
"""

import os
import pkgutil
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from dcpbench.cli import reference
from dcpbench.code.provenance import conf_folders
from dcpbench.config.errors import ConfigError, one_line, set_by_dcpbench
from dcpbench.config.schema import conf_folder, config_class
from dcpbench.core.plugins import plugins
from dcpbench.records.files import SafeStream
from dcpbench.records.row import INTERRUPTED, WRONG_CONFIGURATION
from dcpbench.records.store import ResultsError
from dcpbench.sweep.driver import ENDING_SIGNALS
from dcpbench.sweep.manifest import command_line

if TYPE_CHECKING:
    from dcpbench.sweep.app import SweepRun

_WRONG = (ConfigError, ResultsError, HydraException, OmegaConfBaseException, YAMLError)
"""Errors whose text explains a mistake in the configuration."""
_PRINTS = {"--cfg", "--info", "--hydra-help"}
"""Options that print something and start nothing."""


@dataclass
class Signals:
    """The first of `ENDING_SIGNALS` raises `KeyboardInterrupt` in the main thread, unless the sweep is ending
    already; later ones change nothing. `received` is the number of the first."""

    received: int | None = None
    _is_ending: bool = False

    def obey(self) -> None:
        """Raise from now on. Signals that this process was started to ignore (`nohup`) stay ignored."""
        for number in ENDING_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._take)

    def hold(self) -> None:
        """Only note signals from now on: rows are put in order and reports written, which takes seconds."""
        self._is_ending = True

    def status(self, otherwise: int) -> int:
        """Return the exit status that a shell expects of a process ended by this signal."""
        return otherwise if self.received is None else 128 + self.received

    def _take(self, number: int, _: FrameType | None) -> None:
        if self.received is None:
            self.received = number
            if not self._is_ending:
                self.check()

    def check(self) -> None:
        """Raise if a signal was received: Hydra takes some exceptions for an answer."""
        if self.received is not None:
            raise KeyboardInterrupt(signal.Signals(self.received).name)


class SweepTask:
    """The task function that Hydra hands to the launcher, which stores in it the sweep that it runs; `main`
    then ends that sweep, however it ended."""

    def __init__(self, signals: Signals) -> None:
        self.signals = signals
        self.sweep: SweepRun | None = None

    def __call__(self, config: DictConfig) -> None:
        """Refuse to run a single job, which a configuration with hydra.mode=RUN asks for.

        Raises:
            ConfigError: always; the launcher runs cells.
        """
        self.signals.check()
        raise set_by_dcpbench("hydra.mode=RUN")


def random_seeds(count: int) -> str:
    """Return different seeds, as a list on the command line."""
    return ",".join(map(str, random.SystemRandom().sample(range(1_000_000), count)))


def register_groups(arguments: Sequence[str]) -> None:
    """Register with Hydra the schema, every parallelism as a value of `load_parallel`, what plug-ins add to
    experiments, and functions for experiments: `${random_seeds:10}` and those of plug-ins."""
    OmegaConf.register_new_resolver("random_seeds", random_seeds, use_cache=True, replace=True)
    for name, target in (item for plugin in plugins() for item in plugin.resolvers.items()):
        OmegaConf.register_new_resolver(name, pkgutil.resolve_name(target), replace=True)
    store = ConfigStore.instance()
    store.store(name="schema", node=config_class())
    folders = conf_folders()
    own = reference.config_dir(arguments)
    searched = [*folders, own] if own else folders
    for path in (path for folder in searched for path in sorted(folder.glob("parallel/*.yaml"))):
        same = {"defaults": [{"/parallel@_here_": path.stem}, "_self_"]}
        store.store(group="load_parallel", name=path.stem, node=same)
    for experiment in conf_folder().glob("experiment/*.yaml"):
        group = f"experiment/{experiment.stem}"
        added = [path.stem for folder in folders for path in sorted(folder.glob(f"{group}/*.yaml"))]
        store.store(group=group, name="plugins", node={"defaults": added}, package="_global_")


def main(words: Sequence[str]) -> int:
    """Run the cells that these words select, and return the exit status."""
    sys.stderr = SafeStream(sys.stderr)
    signals, began = Signals(), time.monotonic()
    task = SweepTask(signals)
    status = 1  # of an unexpected exception, whose traceback follows the table
    try:
        signals.obey()
        status = _run(task, words)
    except KeyboardInterrupt:
        status = INTERRUPTED
        if task.sweep is None or not task.sweep.begun:
            exists = task.sweep is not None and task.sweep.folder.path.exists()
            written = "" if exists else "; nothing was written"
            sys.stderr.write(f"dcpbench: interrupted before a cell was run{written}\n")
    finally:
        signals.hold()
        if task.sweep:
            status = task.sweep.end(status, began)
    return signals.status(status)


def _start(by_hydra: Callable[[], None], task: SweepTask) -> None:
    """Let Hydra start the sweep. If it cannot compose one, it tries a single job, and complains about the
    lists instead; then it is run as a sweep."""
    try:
        by_hydra()
    except HydraException:
        typed = [word for word in sys.argv[1:] if not word.startswith("-")]
        parsed = OverridesParser.create().parse_overrides(typed)
        if task.sweep or "--multirun" in sys.argv or not any(map(Override.is_sweep_override, parsed)):
            raise
        sys.argv.append("--multirun")
        by_hydra()


def _run(task: SweepTask, words: Sequence[str]) -> int:
    """Let Hydra run the sweep, and return the exit status; 0 if it depends on the rows alone."""
    # Hydra then raises instead of printing its own, longer, message.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        if {"RANK", "WORLD_SIZE"} <= os.environ.keys():
            instead = "unset them and start dcpbench once; it starts its ranks, on many hosts too"
            raise ConfigError(f"RANK and WORLD_SIZE are set, as by torchrun: {instead}")
        try:
            Path.cwd()
        except FileNotFoundError:
            raise ConfigError("the current folder was removed; change to another one") from None
        sys.argv[1:] = command_line(words)  # which Hydra reads
        register_groups(sys.argv[1:])
        if sys.stderr.isatty() and not {word.partition("=")[0] for word in words} & _PRINTS:
            sys.stderr.write("reading the configuration ...\n")
        app = hydra.main(version_base="1.3", config_path=str(conf_folder()), config_name="config")
        try:
            _start(app(task), task)
        except Exception:  # a library's cleanup, as OmegaConf's, can replace an interrupt by its own error
            task.signals.check()
            raise
    except SystemExit:
        if _PRINTS.isdisjoint(word.partition("=")[0] for word in words):
            raise
        return WRONG_CONFIGURATION  # Hydra reported why it cannot print
    except _WRONG as error:
        sys.stderr.write(f"dcpbench: {one_line(error, words)}\n")
        return WRONG_CONFIGURATION
    return 0
