"""Hosts as the driver sees them: an agent on each, the ranks that it gets, and what it answers."""

import itertools
import platform
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

from dcpbench.config.errors import ConfigError
from dcpbench.config.groups import ExecutorConfig
from dcpbench.executors.base import Engine
from dcpbench.executors.fork_server import Machine
from dcpbench.executors.shared_gpus import ranks_per_gpu
from dcpbench.plugins.hosts.placement import spread
from dcpbench.records.installation import installation

START_S = 60.0
"""How long an agent may take to start, and its host to import torch."""
ANSWER_S = 10.0
"""How long it may take over a short call, or over the end of a stage that is over elsewhere."""
HOSTS_S = 120.0
"""How long to wait until as many hosts are there as were asked for, at the beginning or after one is lost."""

_MOST = 2**20
"""How many ranks a host has room for where nothing limits them."""
_SAME = {"dcpbench": "dcpbench", "python": "Python", "torch": "torch", "plugins": "plug-ins"}
"""Keys of the description of a host whose values have to be the same on every host, and their names."""


class AgentError(Exception):
    """An agent raised; its cause is what."""


@dataclass(eq=False)
class Agent(ABC):
    """A `dcpbench.plugins.hosts.host_agent.HostAgent`, by the name and the address of its host.

    Args:
        gpus: those of the host, counted through all hosts.
        lost: why it is gone, in words.
        description: its host, after `HostsEngine.difference` has asked for it.
    """

    name: str
    address: str
    gpus: tuple[int, ...]
    lost: str | None = None
    description: dict[str, Any] | None = None

    @abstractmethod
    def call(self, method: str, *arguments: Any) -> Future[Any]:
        """Call one of its methods."""

    @abstractmethod
    def why_lost(self, error: BaseException) -> str | None:
        """Why it is gone, if that is why a call of it failed."""

    @abstractmethod
    def give_up(self) -> None:
        """End it, if it is still there; nothing more is asked of it."""

    def answer(self, call: Future[Any], wait_s: float = ANSWER_S) -> Any:
        """What a call has returned; None where it does not, which `lost` then explains.

        Raises:
            AgentError: it raised.
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
        """Call one of its methods, and what that has returned, as with `answer`."""
        return None if self.lost else self.answer(self.call(method, *arguments), wait_s)


@dataclass(frozen=True)
class Placed:
    """The ranks of a group that an agent has."""

    agent: Agent
    ranks: range

    def local_rank(self, rank: int) -> int:
        """The local rank of one of them."""
        return rank - self.ranks.start


class HostsEngine(Engine):
    """Several hosts. An engine has its agents in `agents`, by host, and neighbours together."""

    def __init__(self, config: ExecutorConfig) -> None:
        self.config = config
        self.agents: Sequence[Agent] = ()
        self._numbers = itertools.count(1)
        self._same: dict[str, tuple[str, str]] = {}

    @abstractmethod
    def refresh(self) -> None:
        """Update `agents`: one on each host that exists now, a new one if an agent was lost."""

    def next_number(self) -> int:
        """A number that nothing has had yet: of a stage, its epoch, or of an executor."""
        return next(self._numbers)

    def placed(self, ranks: int, device: str, gpus: Sequence[int]) -> list[Placed] | None:
        """Return which agents get which of so many ranks on this kind of device, among these GPUs; None if
        there is no room."""
        most, hosts = self.config.ranks_per_host or _MOST, self.hosts_of(ranks)
        used = {agent: len({*gpus} & {*agent.gpus}) for agent in self.agents}
        each = ranks_per_gpu(ranks, sum(used.values()) or 1)
        room = {agent: min(most, used[agent] * each) if device == "cuda" else most for agent in self.agents}
        parts = spread(ranks, room, hosts if hosts > 1 else None)
        return None if parts is None else [Placed(agent, part) for agent, part in parts.items()]

    def hosts_of(self, ranks: int) -> int:
        """Return how many hosts were asked for that this many ranks can be on; 1 if none were."""
        return min(self.config.hosts or 1, ranks)

    def difference(self, agent: Agent) -> str | None:
        """Have an agent describe its host, and return how the code there differs from the driver's.

        Torch is compared with that of the first host: the driver imports none, and may have another build.
        None if nothing differs, or if the agent is lost.
        """
        agent.description = agent.description or agent.ask("describe", wait_s=START_S)
        if agent.description is None:
            return None
        if not self._same:
            here = {"python": platform.python_version(), **installation()}
            self._same = {what: (value, "the driver's host") for what, value in here.items()}
        differs: list[str] = []
        for what, name in _SAME.items():
            there = str(agent.description.get(what, "not known"))
            expected, where = self._same.setdefault(what, (there, f"host {agent.name}"))
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
        own = ("host", "address", "dcpbench", "plugins")
        of_first = {name: value for name, value in described[0].items() if name not in own}
        return Machine(gpus, {**of_first, "gpu_count": gpus, "hosts": described}, hosts=self._hosts_of)

    def _hosts_of(self, ranks: int, device: str) -> int:
        gpus = range(sum(len(agent.gpus) for agent in self.agents))
        placed = self.placed(ranks, device, gpus)
        return len(placed or self.agents)
