"""The executor of one host. It forks ranks from a server that has already imported torch."""

import platform
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.context import ForkServerContext
from typing import TYPE_CHECKING, Any

from dcpbench.config.errors import ConfigError
from dcpbench.config.groups import ExecutorConfig
from dcpbench.config.schema import Config, TimeoutsConfig
from dcpbench.core.stage_end import StageEnd
from dcpbench.executors import cleanup, fork_server
from dcpbench.executors.base import Engine, Executor, OnPhase
from dcpbench.executors.fork_server import Machine
from dcpbench.executors.rank_group import Part, RankGroup, store_file
from dcpbench.executors.shared_gpus import ranks_per_gpu
from dcpbench.rank.messages import CellSpec, WorldKind

if TYPE_CHECKING:
    from dcpbench.executors.interpreters import OtherInterpreter


class LocalEngine(Engine):
    """Creates executors that run ranks on this host."""

    def __init__(self, config: ExecutorConfig) -> None:
        """Check the configuration. Start nothing yet.

        Raises:
            ConfigError: it specifies several hosts, or a number of ranks per host.
        """
        valid = {"hosts": (config.hosts or 1) <= 1, "ranks_per_host": config.ranks_per_host is None}
        for key, is_valid in valid.items():
            if not is_valid:
                problem = f"executor={config.name} runs on this host only; choose another executor"
                raise ConfigError(f"executor.{key}={getattr(config, key)}: {problem}")

    def begin(self, modules: Sequence[str]) -> None:
        self._modules = modules
        self._context = fork_server.fork_server(modules)

    def probe(self) -> Machine:
        description, self._more = fork_server.probe(self._context)
        return Machine(description["gpu_count"], description, has_interpreters=True)

    def details(self) -> dict[str, Any]:
        return fork_server.details(self._more)

    def target_error(self, configs: Sequence[Config]) -> str | None:
        return fork_server.target_error(self._context, configs)

    def executor(self, gpus: tuple[int, ...]) -> "LocalExecutor":
        cleanup.adopt_orphans()
        return LocalExecutor(self._context, gpus, self._modules)

    def end(self) -> None:
        cleanup.end_orphans()


def devices_of(kind: WorldKind, ranks: Sequence[int], gpus: Sequence[int]) -> dict[int, str]:
    """Return the device of each rank of a host. Neighbors share a GPU if there are more ranks than `gpus`."""
    if kind.device != "cuda":
        return dict.fromkeys(ranks, kind.device)
    sharing = ranks_per_gpu(len(ranks), len(gpus))
    return {rank: f"cuda:{gpus[local_rank // sharing]}" for local_rank, rank in enumerate(ranks)}


@dataclass
class LocalExecutor(Executor):
    """Runs stages on ranks of this host, which use `gpus`, if any.

    Rank groups of several kinds stay up at the same time, so that the stages of a cell can reuse them. Ranks
    under an interpreter other than `python` (None: the driver's) are run by a process of that interpreter,
    which also imports `modules`.
    """

    context: ForkServerContext
    gpus: tuple[int, ...] = ()
    modules: Sequence[str] = ()
    python: str | None = None
    _groups: dict[WorldKind, RankGroup] = field(default_factory=dict)
    _others: "dict[str, OtherInterpreter]" = field(default_factory=dict)
    interrupted: bool = False

    def run(self, kind: WorldKind, spec: CellSpec, timeouts: TimeoutsConfig, on_phase: OnPhase) -> StageEnd:
        """Run a stage and wait for its end, or until it exceeds a time limit.

        Start ranks of the kind if there are none, or if one has died since the last stage. End all of them
        afterwards if a rank did not report or the stage leaked something into it.
        """
        if other := self._other(kind):
            return other.run(kind, spec, timeouts, on_phase)
        if self.interrupted:  # before it began
            return StageEnd(not_run="interrupted")
        try:
            if kind in self._groups and not self._groups[kind].usable():
                self._kill(kind)
            if kind not in self._groups:
                try:
                    self._start(kind)
                except EOFError:  # the fork server died or did not answer; the second call starts a new one
                    self._start(kind)
        except (OSError, EOFError) as error:
            return StageEnd(not_run=f"the ranks could not be started: {error}")
        if self.interrupted:  # while the ranks were starting
            return StageEnd(not_run="interrupted")
        end = self._groups[kind].run(spec, timeouts, on_phase)
        return end if end.is_clean else replace(end, left=tuple(self._kill(kind)))

    def _start(self, kind: WorldKind) -> None:
        part = Part(platform.node(), devices_of(kind, range(kind.world_size), self.gpus))
        with store_file() as store:
            self._groups[kind] = RankGroup(self.context, kind, part, store)

    def keep_only(self, kinds: set[WorldKind]) -> None:
        for kind in self._groups.keys() - kinds:
            self._groups[kind].leave()
            self._kill(kind)
        for other in self._others.values():
            other.keep_only(kinds)
        for other in filter(None, map(self._other, kinds)):  # a stage will need it: it imports meanwhile
            with suppress(OSError):
                other.start()

    def _other(self, kind: WorldKind) -> "OtherInterpreter | None":
        """Return the other interpreter that runs ranks of this kind; None if this one does."""
        if kind.python in (None, self.python):
            return None
        if kind.python not in self._others:
            from dcpbench.executors.interpreters import OtherInterpreter

            self._others[kind.python] = OtherInterpreter(kind.python, self.modules, self.gpus)
        return self._others[kind.python]

    def interrupt(self) -> None:
        self.interrupted = True
        for group in list(self._groups.values()):
            group.end()
        for other in list(self._others.values()):
            other.interrupt()

    def end(self) -> None:
        for kind in list(self._groups):
            self._kill(kind)
        for other in self._others.values():
            other.end()

    def _kill(self, kind: WorldKind) -> list[str]:
        return self._groups.pop(kind).kill()
