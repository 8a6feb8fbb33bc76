"""Ranks on every host of a Ray cluster: one driver outside any rank, and on each host an actor that owns the
ranks there (`dcpbench.plugins.hosts.host_agent`).

Ray starts the actors, transports calls, and reports when an actor or a host has died. Actors survive the
deaths of ranks, and the driver survives those of actors and hosts. An actor that died is replaced if its host
still exists. Cells continue on the remaining hosts as long as these have enough slots.
"""

import itertools
import os
import signal
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dcpbench.config.errors import ConfigError
from dcpbench.config.groups import ExecutorConfig
from dcpbench.plugins.hosts.host_agent import CALLS, HostAgent, HostEnvironment
from dcpbench.plugins.hosts.hosts import HOSTS_S, HostProxy, HostsEngine
from dcpbench.plugins.hosts.hosts_executor import HostsExecutor

_CONNECT_S = 2.0
"""Seconds for a connection; its first packet, if lost, is sent again after 1 s."""
_ANSWER_S = 5.0
_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)
"""The first bytes of a client, and an empty SETTINGS frame."""
_HTTP2_SETTINGS = 3
"""Index of the byte of a frame that contains its type; SETTINGS is 4."""
_OBJECT_STORE_BYTES = 80 * 2**20


@dataclass(eq=False)
class _Actor(HostProxy):
    """An agent on a node of the cluster."""

    node: str = ""
    actor: Any = None

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        called: Future[Any] = getattr(self.actor, method).remote(*arguments).future()
        return called

    def why_lost(self, error: BaseException) -> str | None:
        if isinstance(error, RayTaskError) or not isinstance(error, RayError):
            return None
        if not any(node["NodeID"] == self.node for node in _nodes()):
            return "was lost with its host, which died, last heard of"
        # If it could not be started, the last line is the exception that it raised.
        *_, raised = str(error).strip().splitlines()
        why = f" ({raised})" if "creation task" in str(error) else ""
        return f"was lost with the actor of its host, which died{why}, last heard of"

    def give_up(self) -> None:
        with suppress(RayError):
            if _is_up():
                ray.kill(self.actor)


class RayEngine(HostsEngine):
    """The hosts of a Ray cluster, with the names of its nodes."""

    agents: Sequence[_Actor]

    def __init__(self, config: ExecutorConfig) -> None:
        super().__init__(config)
        self._modules: Sequence[str] = ()
        self._environment = HostEnvironment.here()
        self._one_at_a_time = threading.Lock()

    def begin(self, modules: Sequence[str]) -> None:
        self._modules = modules
        _connect(self.config.address)
        wanted, deadline = self.config.hosts, time.monotonic() + HOSTS_S
        while wanted and len(there := _offering()) < wanted:
            if time.monotonic() > deadline:
                names = ", ".join(sorted(node["NodeName"] for node in there)) or "none"
                late = f"not there within {HOSTS_S:g} s, only {names}"
                raise ConfigError(f"executor.hosts={wanted}: {late}")
            time.sleep(0.2)
        self.refresh()
        if not self.agents:
            raise ConfigError(f"executor.address={self.config.address}: no host there has a CPU to offer")

    def refresh(self) -> None:
        with self._one_at_a_time:
            self.agents = self._actors(_offering())

    def _actors(self, nodes: Sequence[dict[str, Any]]) -> list[_Actor]:
        known = {agent.node: agent for agent in self.agents if not agent.lost}
        names = [node["NodeName"] for node in nodes]
        first_gpu = itertools.count()
        actors: list[_Actor] = []
        for node in sorted(nodes, key=lambda node: (node["NodeName"], node["NodeID"])):
            number, name = node["NodeID"], node["NodeName"]
            name = name if names.count(name) == 1 else f"{name}/{number[:8]}"
            gpus = tuple(next(first_gpu) for _ in range(int(node["Resources"].get("GPU", 0))))
            actors.append(known.get(number) or self._started(name, node, gpus))
            actors[-1].name, actors[-1].gpus = name, gpus
        return actors

    def _started(self, name: str, node: dict[str, Any], gpus: tuple[int, ...]) -> _Actor:
        strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        placed = {"num_cpus": 0, "num_gpus": len(gpus), "max_concurrency": CALLS}
        agent = ray.remote(HostAgent).options(scheduling_strategy=strategy, max_restarts=0, **placed)
        address = str(node["NodeManagerAddress"])
        actor = agent.remote(name, address, self._environment, self._modules)
        return _Actor(name, address, gpus, node=node["NodeID"], actor=actor)

    def executor(self, gpus: tuple[int, ...]) -> HostsExecutor:
        return HostsExecutor(self, self.next_number(), gpus)

    def end(self) -> None:
        if not ray.is_initialized():
            return
        for agent in self.agents if _is_up() else ():
            agent.ask("end")
            agent.give_up()
        self.agents = ()
        if _is_up():
            ray.shutdown()


def _offering() -> list[dict[str, Any]]:
    """Return the nodes that can run ranks; the head of a cluster may offer no CPU."""
    return [node for node in _nodes() if node["Resources"].get("CPU")]


def _nodes() -> list[dict[str, Any]]:
    """Return the nodes of the cluster whose daemon can be reached. Ray takes 14 s to detect that one is
    dead."""
    if not _is_up():
        return []
    alive = [node for node in ray.nodes() if node["Alive"]]
    return [node for node in alive if _reachable(node["NodeManagerAddress"], node["NodeManagerPort"])]


def _is_up() -> bool:
    """Return whether the head of the cluster can be reached. After it has exited, as when a Slurm job is
    cancelled, any request makes Ray wait for a minute and then end this process."""
    host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
    return _reachable(host, int(port))


def _reachable(address: str, port: int) -> bool:
    with suppress(OSError):
        socket.create_connection((address, port), _CONNECT_S).close()
        return True
    return False


def _speaks_grpc(address: str, port: int) -> bool:
    """Return whether a server answers the first bytes of HTTP/2 (RFC 9113, 3.4) with a SETTINGS frame."""
    with suppress(OSError), socket.create_connection((address, port), _CONNECT_S) as connection:
        connection.settimeout(_ANSWER_S)
        connection.sendall(_HTTP2_PREFACE)
        frame = b""
        while len(frame) < _HTTP2_SETTINGS + 1 and (more := connection.recv(64)):
            frame += more
        return len(frame) > _HTTP2_SETTINGS and frame[_HTTP2_SETTINGS] == 4
    return False


def _refuse_other_servers(key: str, address: str) -> None:
    """Refuse an address that is not a cluster's; Ray would keep trying for minutes, or for ever.

    Raises:
        ConfigError: nothing answers there, or another server.
    """
    if "://" in address:
        raise ConfigError(f"{key}: must be HOST:PORT, auto or null")
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        return
    if not _reachable(host, int(port)):
        raise ConfigError(f"{key}: nothing answers there; must be that of a Ray cluster")
    if os.environ.get("RAY_USE_TLS", "0") == "0" and not _speaks_grpc(host, int(port)):
        raise ConfigError(
            f"{key}: the server there is not a Ray cluster, whose default port is 6379; 8265 is its dashboard"
        )


def _connect(address: str | None) -> None:
    """Join a cluster, or start one on this host for this process only."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    quiet = {"log_to_driver": False, "configure_logging": False, "logging_level": "error"}
    of_own_cluster = {"include_dashboard": False, "object_store_memory": _OBJECT_STORE_BYTES}
    key, named = f"executor.address={address}", os.environ.get("RAY_ADDRESS", "")
    if address == "auto" and named:
        _refuse_other_servers(f"{key} (RAY_ADDRESS={named})", named)
    _refuse_other_servers(key, address or "")
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address or "local", **quiet, **({} if address else of_own_cluster))
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{key}: {' '.join(str(error).split())}") from None
    finally:
        signal.signal(signal.SIGTERM, handler)  # Ray replaces it
