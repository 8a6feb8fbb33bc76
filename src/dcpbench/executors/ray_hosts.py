"""The hosts of a Ray cluster as the driver sees them: which there are, and what their actors answer."""

import itertools
import os
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dcpbench.config.errors import ConfigError
from dcpbench.config.groups import ExecutorConfig
from dcpbench.executors.host_agent import HostAgent, Surroundings

START_S = 60.0
"""How long an actor may take to start, and its host to import torch."""
ANSWER_S = 10.0
"""How long it may take over a short call, or over the end of a stage that is over elsewhere."""
_CONNECT_S = 1.0
_ROOM = 2**20
"""For how many ranks a host without GPUs has room, if nothing is said."""
_OBJECT_STORE_BYTES = 80 * 2**20
_CALLS = 16
"""How many calls an actor takes at once: a stage is one."""


@dataclass
class Host:
    """A host as the driver knows it, by the name that Ray has for its node."""

    name: str
    node: str
    address: str
    gpus: tuple[int, ...]
    actor: Any
    lost: str | None = None
    """Why it, or its actor, is gone."""

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of its agent; a reference to what it will return."""
        return getattr(self.actor, method).remote(*arguments)


class RayHosts:
    """The hosts of a cluster, by their names."""

    def __init__(self, config: ExecutorConfig) -> None:
        self._config = config
        self.hosts: dict[str, Host] = {}
        self._modules: Sequence[str] = ()
        self._around = Surroundings.here()
        self._numbers = itertools.count(1)
        self._one_at_a_time = threading.Lock()

    def begin(self, modules: Sequence[str]) -> None:
        self._modules = modules
        _connect(self._config.address)
        self.refresh()
        if not self.hosts:
            raise ConfigError(f"executor.address={self._config.address}: no host there has a CPU to offer")

    def next_number(self) -> int:
        """A number that nothing has had yet: of a stage, its epoch, or of an executor."""
        return next(self._numbers)

    def refresh(self) -> None:
        """Have an actor on every host: new ones where it is gone, none where the host is."""
        with self._one_at_a_time:
            self.hosts = self._hosts(_nodes())

    def _hosts(self, nodes: Sequence[dict[str, Any]]) -> dict[str, Host]:
        known = {host.node: host for host in self.hosts.values() if not host.lost}
        names = [node["NodeName"] for node in nodes]
        first_gpu = itertools.count()
        hosts: dict[str, Host] = {}
        for node in sorted(nodes, key=lambda node: (node["NodeName"], node["NodeID"])):
            if not node["Resources"].get("CPU"):  # the head of a cluster may be there for that alone
                continue
            one, name = node["NodeID"], node["NodeName"]
            name = name if names.count(name) == 1 else f"{name}/{one[:8]}"
            gpus = tuple(next(first_gpu) for _ in range(int(node["Resources"].get("GPU", 0))))
            hosts[name] = known.get(one) or self._started(name, node, gpus)
            hosts[name].gpus = gpus
        return hosts

    def _started(self, name: str, node: dict[str, Any], gpus: tuple[int, ...]) -> Host:
        strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        placed = {"num_cpus": 0, "num_gpus": len(gpus), "max_concurrency": _CALLS}
        agent = ray.remote(HostAgent).options(scheduling_strategy=strategy, max_restarts=0, **placed)
        address = str(node["NodeManagerAddress"])
        actor = agent.remote(name, address, self._around, self._modules)
        return Host(name, node["NodeID"], address, gpus, actor)

    def room(self, device: str, gpus: Sequence[int]) -> dict[str, int]:
        """For how many ranks on this kind of device each host has room, among these GPUs."""
        most = self._config.ranks_per_host or _ROOM
        if device != "cuda":
            return dict.fromkeys(self.hosts, most)
        own = set(gpus)
        return {name: min(most, len(own.intersection(host.gpus))) for name, host in self.hosts.items()}

    def ask(self, host: Host, method: str, *arguments: Any, wait_s: float = ANSWER_S) -> Any:
        """What an agent returns; None where it does not, which `host.lost` then explains.

        Raises:
            RayTaskError: it raised.
        """
        if host.lost:
            return None
        return self.answer(host, host.call(method, *arguments), wait_s)

    def answer(self, host: Host, reference: Any, wait_s: float = ANSWER_S) -> Any:
        """What a call has returned, as with `ask`."""
        try:
            return ray.get(reference, timeout=wait_s)
        except RayTaskError:
            raise
        except GetTimeoutError:
            host.lost = f"did not answer within {wait_s:g} s, last heard of"
        except RayError as error:
            host.lost = self._why_lost(host, error)
        with suppress(RayError):
            ray.kill(host.actor)
        return None

    def _why_lost(self, host: Host, error: RayError) -> str:
        if not any(node["NodeID"] == host.node for node in _nodes()):
            return "was lost with its host, which died, last heard of"
        # Where it could not even start, the last line is the exception that it raised.
        *_, raised = str(error).strip().splitlines()
        why = f" ({raised})" if "creation task" in str(error) else ""
        return f"was lost with the actor of its host, which died{why}, last heard of"


def _nodes() -> list[dict[str, Any]]:
    """The nodes of the cluster whose daemon can be reached: Ray itself takes 14 s to find one dead."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    return [node for node in alive if _reachable(node["NodeManagerAddress"], node["NodeManagerPort"])]


def _reachable(address: str, port: int) -> bool:
    with suppress(OSError):
        socket.create_connection((address, port), _CONNECT_S).close()
        return True
    return False


def _connect(address: str | None) -> None:
    """Join a cluster, or start one on this host for this process alone."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    quiet = {"log_to_driver": False, "configure_logging": False, "logging_level": "error"}
    own = {"include_dashboard": False, "object_store_memory": _OBJECT_STORE_BYTES}
    host, _, port = (address or "").rpartition(":")
    if port.isdecimal() and not _reachable(host, int(port)):  # Ray would go on asking for minutes
        raise ConfigError(f"executor.address={address}: nothing answers there; must be that of a Ray cluster")
    with _handlers_kept():
        try:
            ray.init(address=address or "local", **quiet, **({} if address else own))
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise ConfigError(f"executor.address={address}: {' '.join(str(error).split())}") from None


@contextmanager
def _handlers_kept() -> Iterator[None]:
    """Ray takes SIGTERM for itself, which the sweep obeys."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
