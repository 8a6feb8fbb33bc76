"""The executor of one host. Its ranks are forked from agents that have already imported torch."""

import platform
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from dcpbench.config.errors import ConfigError
from dcpbench.config.groups import ExecutorConfig
from dcpbench.config.schema import Config, TimeoutsConfig
from dcpbench.core.stage_end import StageEnd
from dcpbench.executors import cleanup, machine
from dcpbench.executors.agent import Agent, own_agent
from dcpbench.executors.base import Engine, Executor, OnPhase
from dcpbench.executors.machine import Machine
from dcpbench.executors.rank_group import RankGroup, RanksOfHost, store_file
from dcpbench.executors.shared_gpus import ranks_per_gpu
from dcpbench.rank.messages import CellSpec, WorldSpec


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
        self._agents: dict[str | None, Agent] = {None: own_agent(modules)}

    def probe(self) -> Machine:
        description, self._more = machine.probe(self._agents[None])
        return Machine(description["gpu_count"], description, has_interpreters=True)

    def details(self) -> dict[str, Any]:
        return machine.details(self._more)

    def target_error(self, configs: Sequence[Config]) -> str | None:
        return machine.target_error(self._agents[None], configs)

    def executor(self, gpus: tuple[int, ...]) -> "LocalExecutor":
        cleanup.adopt_orphans()
        return LocalExecutor(self._agents, gpus, self._modules)

    def end(self) -> None:
        for agent in self._agents.values():
            agent.end()
        cleanup.end_orphans()


def devices_of(kind: WorldSpec, ranks: Sequence[int], gpus: Sequence[int]) -> dict[int, str]:
    """Return the device of each rank of a host. Neighbors share a GPU if there are more ranks than `gpus`."""
    if kind.device != "cuda":
        return dict.fromkeys(ranks, kind.device)
    sharing = ranks_per_gpu(len(ranks), len(gpus))
    return {rank: f"cuda:{gpus[local_rank // sharing]}" for local_rank, rank in enumerate(ranks)}


@dataclass
class LocalExecutor(Executor):
    """Runs stages on ranks of this host, which use `gpus`, if any.

    Rank groups of several kinds stay up at the same time, so that the stages of a cell can reuse them.
    `agents` are by interpreter (None: the driver's), import `modules`, and are shared by all executors.
    """

    agents: dict[str | None, Agent]
    gpus: tuple[int, ...] = ()
    modules: Sequence[str] = ()
    _groups: dict[WorldSpec, RankGroup] = field(default_factory=dict)
    interrupted: bool = False

    def run(self, kind: WorldSpec, spec: CellSpec, timeouts: TimeoutsConfig, on_phase: OnPhase) -> StageEnd:
        """Run a stage and wait for its end, or until it exceeds a time limit.

        Start ranks of the kind if there are none, or if one has died since the last stage. End all of them
        afterwards if a rank did not report or the stage leaked something into it.
        """
        if self.interrupted:  # before it began
            return StageEnd(not_run="interrupted")
        try:
            if kind in self._groups and not self._groups[kind].usable():
                self._kill(kind)
            if kind not in self._groups:
                try:
                    self._start(kind)
                except EOFError:  # the agent died or did not answer; the second call starts a new one
                    self._start(kind)
        except (OSError, EOFError) as error:
            under = f" under {kind.python}" if kind.python else ""
            return StageEnd(not_run=f"the ranks{under} could not be started: {error}")
        if self.interrupted:  # while the ranks were starting
            return StageEnd(not_run="interrupted")
        end = self._groups[kind].run(spec, timeouts, on_phase)
        return end if end.is_clean else replace(end, unremoved_memory=tuple(self._kill(kind)))

    def _start(self, kind: WorldSpec) -> None:
        part = RanksOfHost(platform.node(), devices_of(kind, range(kind.world_size), self.gpus))
        with store_file() as store:
            self._groups[kind] = RankGroup(self._agent(kind), kind, part, store)

    def keep_only(self, kinds: set[WorldSpec]) -> None:
        for kind in self._groups.keys() - kinds:
            self._groups[kind].leave()
            self._kill(kind)
        for agent in map(self._agent, kinds):  # a stage will need it: it imports meanwhile
            with suppress(OSError):
                agent.start()

    def _agent(self, kind: WorldSpec) -> Agent:
        """Return the agent of the interpreter that runs ranks of this kind."""
        if kind.python not in self.agents:
            from dcpbench.executors.interpreters import interpreter

            assert kind.python
            self.agents.setdefault(kind.python, interpreter(kind.python, self.modules))
        return self.agents[kind.python]

    def interrupt(self) -> None:
        self.interrupted = True
        for group in list(self._groups.values()):
            group.end()

    def end(self) -> None:
        for kind in list(self._groups):
            self._kill(kind)

    def _kill(self, kind: WorldSpec) -> list[str]:
        return self._groups.pop(kind).kill()
