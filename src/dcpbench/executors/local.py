"""The executor of one host: ranks forked from a server that has torch imported, watched, and ended."""

import platform
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.context import ForkServerContext

from dcpbench.config.errors import ConfigError
from dcpbench.config.groups import ExecutorConfig
from dcpbench.config.schema import TimeoutsConfig
from dcpbench.core.stage_end import StageEnd
from dcpbench.executors import cleanup, fork_server
from dcpbench.executors.base import Engine, Executor, OnPhase
from dcpbench.executors.fork_server import Machine
from dcpbench.executors.interpreters import OtherInterpreter, versions_of
from dcpbench.executors.rank_group import Part, RankGroup, store_file
from dcpbench.executors.shared_gpus import ranks_per_gpu
from dcpbench.rank.messages import CellSpec, WorldKind


class LocalEngine(Engine):
    """This host."""

    def __init__(self, config: ExecutorConfig) -> None:
        """Refuse what needs several hosts. Nothing is started yet.

        Raises:
            ConfigError: a number of hosts, or of ranks on each, is asked for.
        """
        one_host = {"hosts": (config.hosts or 1) <= 1, "ranks_per_host": config.ranks_per_host is None}
        for key, is_enough in one_host.items():
            if not is_enough:
                asked = f"executor.{key}={getattr(config, key)}"
                raise ConfigError(
                    f"{asked}: executor={config.name} has this host alone; choose another executor"
                )

    def begin(self, modules: Sequence[str]) -> None:
        self._modules = modules
        self._context = fork_server.fork_server(modules)

    def probe(self) -> Machine:
        importing = partial(fork_server.import_error, self._context)
        return replace(fork_server.probe(self._context), versions_of=versions_of, import_error=importing)

    def executor(self, gpus: tuple[int, ...]) -> "LocalExecutor":
        cleanup.adopt_orphans()
        return LocalExecutor(self._context, gpus, self._modules)

    def end(self) -> None:
        cleanup.end_orphans()


def devices_of(kind: WorldKind, ranks: Sequence[int], gpus: Sequence[int]) -> dict[int, str]:
    """The device of each of these ranks of a host, neighbors on one GPU where there are fewer `gpus`."""
    if kind.device != "cuda":
        return dict.fromkeys(ranks, kind.device)
    each = ranks_per_gpu(len(ranks), len(gpus))
    return {rank: f"cuda:{gpus[local_rank // each]}" for local_rank, rank in enumerate(ranks)}


@dataclass
class LocalExecutor(Executor):
    """Runs stages on ranks of this host, which use `gpus`, if any.

    Groups of several kinds stay up side by side, so that the stages of a cell need not start them anew. Ranks
    under another interpreter than `python` (None: the driver's) belong to a process of that interpreter,
    which imports `modules` too.
    """

    context: ForkServerContext
    gpus: tuple[int, ...] = ()
    modules: Sequence[str] = ()
    python: str | None = None
    _groups: dict[WorldKind, RankGroup] = field(default_factory=dict)
    _others: dict[str, OtherInterpreter] = field(default_factory=dict)
    interrupted: bool = False

    def run(self, kind: WorldKind, spec: CellSpec, timeouts: TimeoutsConfig, on_phase: OnPhase) -> StageEnd:
        """Run a stage and wait for its end, or until something has taken longer than it may.

        Ranks of the kind are started if there are none or one has died since the last stage; where one
        did not report, or is not as it was born, all are ended. `on_phase` is called as they get on.
        """
        if kind.python and kind.python != self.python:
            if kind.python not in self._others:
                self._others[kind.python] = OtherInterpreter(kind.python, self.modules, self.gpus)
            return self._others[kind.python].run(kind, spec, timeouts, on_phase)
        if self.interrupted:  # before it began
            return StageEnd(not_run="interrupted")
        try:
            if kind in self._groups and not self._groups[kind].usable():
                self._kill(kind)
            if kind not in self._groups:
                self._groups[kind] = self._started(kind)
        except (OSError, EOFError) as error:
            return StageEnd(not_run=f"the ranks could not be started: {error}")
        if self.interrupted:  # while the ranks were on their way
            return StageEnd(not_run="interrupted")
        end = self._groups[kind].run(spec, timeouts, on_phase)
        return end if end.is_clean else replace(end, left=tuple(self._kill(kind)))

    def _started(self, kind: WorldKind) -> RankGroup:
        part = Part(platform.node(), devices_of(kind, range(kind.world_size), self.gpus))
        try:
            with store_file() as store:
                return RankGroup(self.context, kind, part, store)
        except EOFError:  # the server did not answer, or died: the next one may
            with store_file() as store:
                return RankGroup(self.context, kind, part, store)

    def keep_only(self, kinds: set[WorldKind]) -> None:
        """Have the ranks of other kinds leave: they would only take up room, or are to be fresh again."""
        for kind in self._groups.keys() - kinds:
            self._groups[kind].leave()
            self._kill(kind)
        for other in self._others.values():
            other.keep_only(kinds)

    def interrupt(self) -> None:
        """End what runs in another thread: its stage ends at once, and no other begins."""
        self.interrupted = True
        for group in list(self._groups.values()):
            group.end()
        for other in list(self._others.values()):
            other.interrupt()

    def end(self) -> None:
        """End all ranks, and wait until they and whatever they started are gone."""
        for kind in list(self._groups):
            self._kill(kind)
        for other in self._others.values():
            other.end()

    def _kill(self, kind: WorldKind) -> list[str]:
        left = self._groups[kind].kill()
        del self._groups[kind]
        return left
