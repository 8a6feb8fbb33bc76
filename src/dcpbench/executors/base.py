"""The contract of what starts ranks and runs stages of cells on them; nothing else knows where ranks live."""

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Protocol

from dcpbench.config.errors import ConfigError
from dcpbench.config.groups import ExecutorConfig
from dcpbench.config.schema import TimeoutsConfig
from dcpbench.core.stage_end import StageEnd
from dcpbench.executors.fork_server import Machine
from dcpbench.rank.messages import CellSpec, WorldKind

OnPhase = Callable[[int, str], None]
"""Called with a rank and the phase that it begins."""


class HostsLostError(Exception):
    """The ranks of a cell have no room on the hosts that are left, or must not run there: the sweep ends, and
    can be resumed."""


class Executor(Protocol):
    """Ranks of several kinds, kept from stage to stage until something went wrong on them."""

    interrupted: bool

    def run(self, kind: WorldKind, spec: CellSpec, timeouts: TimeoutsConfig, on_phase: OnPhase) -> StageEnd:
        """Run a stage on ranks of this kind, fresh ones if there are none, and wait for its end.

        Raises:
            HostsLostError: such ranks have no room on the hosts that are left, or must not run there.
        """

    def keep_only(self, kinds: set[WorldKind]) -> None:
        """Have the ranks of other kinds leave: they would only take up room, or are to be fresh again."""

    def interrupt(self) -> None:
        """End what runs in another thread: its stage ends at once, and no other begins."""

    def end(self) -> None:
        """End all ranks, and wait until they and whatever they started are gone."""


class Engine(Protocol):
    """Where the ranks of a sweep live, and what makes its executors; nothing else knows of how many hosts."""

    def __init__(self, config: ExecutorConfig) -> None:
        """Nothing is started yet."""

    def begin(self, modules: Sequence[str]) -> None:
        """Have every host import what ranks are born with, while the driver does something else.

        Raises:
            ConfigError: there is no such engine.
        """

    def probe(self) -> Machine:
        """What there is to run cells on; waits until it is there.

        Raises:
            ConfigError: it cannot be found out.
        """

    def executor(self, gpus: tuple[int, ...]) -> Executor:
        """An executor of its own, whose ranks use those of the GPUs with these numbers."""

    def end(self) -> None:
        """End what ranks have left behind, once every executor has ended."""


def engine_of(config: ExecutorConfig) -> Engine:
    """The engine that a configuration names.

    Raises:
        ConfigError: there is none of that name, or a package that it needs is not installed.
    """
    module, _, name = config.target.rpartition(".")
    try:
        engine: Engine = getattr(import_module(module), name)(config)
    except ModuleNotFoundError as error:
        wants = f"needs the package {error.name}, as with pip install 'dcpbench[{config.name}]'"
        raise ConfigError(f"executor={config.name}: {wants}") from None
    return engine
