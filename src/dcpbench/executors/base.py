"""The contract of engines and executors: no other package knows where ranks run.

All calls come from the driver. An engine lives as long as its sweep:

1. `Engine(config)`, then `begin(modules)`: imports begin while cells are composed.
2. `probe()`, when a cell needs the machine; `hosts_of` and `target_error` decide which cells can run.
3. `executor(gpus)`, once for each cell that runs at the same time. Such a cell has a thread of the driver.
4. For each attempt of a cell `keep_only(kinds)`; for each of its stages `run(kind, spec, ...)`, which returns
   how the stage ended on each rank, and judges nothing. After anything but a pass `keep_only(set())`.
5. `interrupt()`, from another thread, at any time of `run`; this then returns at once.
6. `Executor.end()` of each, then `Engine.end()`, also after an exception.

The usual ways to write one: fork ranks on this host, from agents (`local.py`); start a process elsewhere that
owns the ranks there, and pass it the stages (`plugins/hosts/`).
"""

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, Protocol

from dcpbench.config.errors import ConfigError
from dcpbench.config.groups import ExecutorConfig
from dcpbench.config.schema import Config, TimeoutsConfig
from dcpbench.core.stage_end import StageEnd
from dcpbench.executors.machine import Machine
from dcpbench.rank.messages import CellSpec, WorldSpec

OnPhase = Callable[[int, str, str], None]
"""Called with a rank, the phase that it begins, and a sentence for the user or an empty text."""


class HostsLostError(Exception):
    """The remaining hosts cannot run the ranks of a cell, or must not. The sweep ends and can be resumed."""


class Executor(Protocol):
    """Runs stages on ranks of several kinds. Ranks are reused until a stage goes wrong on them."""

    interrupted: bool

    def run(self, kind: WorldSpec, spec: CellSpec, timeouts: TimeoutsConfig, on_phase: OnPhase) -> StageEnd:
        """Run a stage on ranks of this kind and wait for its end. Start the ranks if there are none.

        Raises:
            HostsLostError: the remaining hosts cannot run these ranks, or must not.
        """

    def keep_only(self, kinds: set[WorldSpec]) -> None:
        """Let ranks of other kinds exit, because they only use memory or must be replaced."""

    def interrupt(self) -> None:
        """End the stage that runs in another thread at once, and start no other."""

    def end(self) -> None:
        """End all ranks and the processes that they started, and wait until all have exited."""


class Engine(Protocol):
    """Creates executors on one host or several. No other package knows how many hosts there are."""

    def __init__(self, config: ExecutorConfig) -> None:
        """Store the configuration. Start nothing yet."""

    def begin(self, modules: Sequence[str]) -> None:
        """Import the modules of ranks on every host, in the background.

        Raises:
            ConfigError: there is no such engine.
        """

    def probe(self) -> Machine:
        """Describe the hardware that cells can use; wait until it is available.

        Raises:
            ConfigError: the hardware cannot be determined.
        """

    def details(self) -> dict[str, Any]:
        """Return the part of the description that takes longer than `probe`."""
        return {}

    def hosts_of(self, ranks: int, device: str) -> int:
        """Return how many hosts run a number of ranks on a type of device."""
        return 1

    def target_error(self, configs: Sequence[Config]) -> str | None:
        """Return why ranks cannot use the `workload.target` of these configurations, None if they can."""
        return None

    def executor(self, gpus: tuple[int, ...]) -> Executor:
        """Create an executor whose ranks use the GPUs with these numbers."""

    def end(self) -> None:
        """End the processes that ranks leaked, after every executor has ended."""


def engine_of(config: ExecutorConfig) -> Engine:
    """Create the engine that a configuration names.

    Raises:
        ConfigError: the engine needs a package that is not installed, or rejects the configuration.
    """
    module, _, name = config.target.replace(":", ".").rpartition(".")
    try:  # not by `pkgutil.resolve_name`, which hides a package that is missing
        engine: Engine = getattr(import_module(module), name)(config)
    except ModuleNotFoundError as error:
        missing = f"needs the package {error.name}; pip install 'dcpbench[{config.name}]'"
        raise ConfigError(f"executor={config.name}: {missing}") from None
    return engine
