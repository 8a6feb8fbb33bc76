"""Hosts from the view of the driver: an agent on each, its ranks, and its answers."""

import itertools
import platform
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

from dcpbench.code.provenance import installation
from dcpbench.config.errors import ConfigError
from dcpbench.config.groups import ExecutorConfig
from dcpbench.config.schema import Config
from dcpbench.executors.base import Engine
from dcpbench.executors.machine import Machine
from dcpbench.executors.shared_gpus import ranks_per_gpu
from dcpbench.plugins.hosts.placement import spread

START_S = 60.0
"""Seconds that an agent can take to start, including the import of torch."""
ANSWER_S = 10.0
"""Seconds for an answer to a short call, or for the end of a stage that has ended on another host."""
IMPORT_S = 180.0
"""Seconds in which a host imports a target; it waits for that for 120 s itself."""
HOSTS_S = 120.0
"""Seconds to wait for the requested number of hosts, at the beginning or after one is lost."""

_MOST = 2**20
"""The number of ranks on a host without a limit."""
_SAME = {"dcpbench": "dcpbench", "python": "Python", "torch": "torch", "plugins": "plug-ins"}
"""Keys of a host's description whose values must be equal on all hosts, and their names."""


class AgentError(Exception):
    """An agent raised the cause of this error."""


@dataclass(eq=False)
class HostProxy(ABC):
    """A `dcpbench.plugins.hosts.host_agent.HostProxy`, by the name and the address of its host.

    Args:
        gpus: the host's GPUs, numbered across all hosts.
        lost: reason why the agent is lost.
        description: of its host, after `HostsEngine.difference` has requested it.
    """

    name: str
    address: str
    gpus: tuple[int, ...]
    lost: str | None = None
    description: dict[str, Any] | None = None

    @abstractmethod
    def call(self, method: str, *arguments: Any) -> Future[Any]:
        """Call a method of the agent."""

    @abstractmethod
    def why_lost(self, error: BaseException) -> str | None:
        """Return why the agent is lost, if a call failed because of that."""

    @abstractmethod
    def give_up(self) -> None:
        """End the agent, if it still exists. Do not call it afterwards."""

    def answer(self, call: Future[Any], wait_s: float = ANSWER_S) -> Any:
        """Return the result of a call; None if the agent is lost, for the reason in `lost`.

        Raises:
            AgentError: the call raised.
        """
        if not wait([call], wait_s).done:
            self.lost = f"did not answer within {wait_s:g} s, last heard of"
        elif not (error := call.exception()):
            return call.result()
        else:
            self.lost = self.why_lost(error)
            if not self.lost:
                raise AgentError(str(error)) from error
        self.give_up()
        return None

    def ask(self, method: str, *arguments: Any, wait_s: float = ANSWER_S) -> Any:
        """Call a method of the agent and return its result, as `answer` does."""
        return None if self.lost else self.answer(self.call(method, *arguments), wait_s)


@dataclass(frozen=True)
class Placed:
    """An agent and its ranks of a group."""

    agent: HostProxy
    ranks: range


class HostsEngine(Engine):
    """Several hosts. Subclasses keep `agents`, one per host, in an order with neighbors next to each
    other."""

    def __init__(self, config: ExecutorConfig) -> None:
        self.config = config
        self.agents: Sequence[HostProxy] = ()
        self._numbers = itertools.count(1)
        self._same: dict[str, tuple[str, str]] = {}

    @abstractmethod
    def refresh(self) -> None:
        """Update `agents`: one on each existing host, and a new one if an agent was lost."""

    def next_number(self) -> int:
        """Return a unique number: the epoch of a stage, or the number of an executor."""
        return next(self._numbers)

    def placed(self, ranks: int, device: str, gpus: Sequence[int]) -> list[Placed] | None:
        """Place `ranks` ranks on agents, with this kind of device, on these GPUs; None if there is no
        room."""
        most, hosts = self.config.ranks_per_host or _MOST, self.requested_hosts(ranks)
        used = {agent: len({*gpus} & {*agent.gpus}) for agent in self.agents}
        per_gpu = ranks_per_gpu(ranks, sum(used.values()) or 1)
        room = {
            agent: min(most, used[agent] * per_gpu) if device == "cuda" else most for agent in self.agents
        }
        parts = spread(ranks, room, hosts if hosts > 1 else None)
        return None if parts is None else [Placed(agent, host_ranks) for agent, host_ranks in parts.items()]

    def requested_hosts(self, ranks: int) -> int:
        """Return the requested number of hosts, at most one per rank; 1 if none was requested."""
        return min(self.config.hosts or 1, ranks)

    def difference(self, agent: HostProxy) -> str | None:
        """Request the description of an agent's host, and return how its code differs from the driver's.

        Torch is compared with that of the first host, because the driver does not import it and can have
        another build. None if nothing differs, or if the agent is lost.
        """
        agent.description = agent.description or agent.ask("describe", wait_s=START_S)
        if agent.description is None:
            return None
        if not self._same:
            here = {"python": platform.python_version(), **installation()}
            self._same = {key: (version, "the driver's host") for key, version in here.items()}
        differs: list[str] = []
        for key, name in _SAME.items():
            there = str(agent.description.get(key, "not known"))
            expected, where = self._same.setdefault(key, (there, f"host {agent.name}"))
            if there != expected:
                differs.append(f"{name} is {there} on host {agent.name} and {expected} on {where}")
        return f"{', '.join(differs)}; must be the same on every host" if differs else None

    def probe(self) -> Machine:
        described: list[dict[str, Any]] = []
        for agent in self.agents:
            differs, name = self.difference(agent), self.config.name
            if agent.description is None:
                raise ConfigError(f"executor={name}: host {agent.name} did not start: {agent.lost}")
            if differs:
                raise ConfigError(f"executor={name}: {differs}")
            described.append(agent.description)
        gpus = sum(len(agent.gpus) for agent in self.agents)
        of_one_host = ("host", "address", "dcpbench", "plugins")
        of_first = {name: fact for name, fact in described[0].items() if name not in of_one_host}
        description = {**of_first, "gpu_count": gpus, "hosts": described}
        return Machine(gpus, description)

    def target_error(self, configs: Sequence[Config]) -> str | None:
        here = [agent for agent in self.agents if not agent.lost]
        calls = [(agent, agent.call("target_error", configs)) for agent in here]
        for agent, call in calls:
            if error := agent.answer(call, IMPORT_S):
                return f"{error} (host {agent.name})"
        return None

    def hosts_of(self, ranks: int, device: str) -> int:
        gpus = range(sum(len(agent.gpus) for agent in self.agents))
        placed = self.placed(ranks, device, gpus)
        return len(placed or self.agents)
