"""The hosts that `bench/hosts.py` runs sweeps on, and what may fail of them."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.hosts import RayDaemons, ray_in
from support.namespaces import cut, namespaces

OBJECT_STORE_BYTES = 80 * 2**20


class Hosts:
    """A Ray cluster on this machine, its nodes named by their addresses from 127.0.0.2 on."""

    kinds = ("rank killed", "agent killed", "host", "agent stopped", "driver", "rank stopped")
    """What may fail."""
    most_s = 15.0
    """What a failure may cost."""

    def __init__(self, count: int, gpus: int) -> None:
        from ray.cluster_utils import Cluster

        # Else the first host waits for half a minute when it ends, for those that have ended before it.
        os.environ["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] = "0"
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        self._cluster = Cluster()
        self._last = 1
        for number in range(count):
            # A node hands out the GPUs that it sees: each its own part of them.
            own = range(gpus * number // count, gpus * (number + 1) // count)
            self.add(own)

    @property
    def words(self) -> tuple[str, str]:
        """What has a sweep run on them."""
        return "executor=ray", f"executor.address={self._cluster.address}"

    @property
    def nodes(self) -> list[Any]:
        """Those that are there, but the first, which has the cluster's own services."""
        return [node for node in self._cluster.list_all_nodes() if node is not self._cluster.head_node]

    def add(self, gpus: Sequence[int] = ()) -> None:
        """One more host, at the next address."""
        self._last += 1
        if gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
        of_node = {"num_cpus": 1, "num_gpus": len(gpus), "object_store_memory": OBJECT_STORE_BYTES}
        self._cluster.add_node(node_ip_address=f"127.0.0.{self._last}", **of_node)
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)

    def remove(self, node: Any) -> None:
        """End a host, with all that runs there."""
        self._cluster.remove_node(node, allow_graceful=False)

    def end(self) -> None:
        """End all of them."""
        self._cluster.shutdown()

    def start(self, folder: Path, *words: str) -> "subprocess.Popen[bytes]":
        """A driver of a sweep on them."""
        return driver(folder, *words, *self.words, f"hydra.sweep.dir={folder}")

    def fail_host(self) -> str:
        """End a host, for which another one comes; which."""
        node = self.nodes[-1]
        self.remove(node)
        self.add()
        return str(node.node_ip_address)

    def is_agent(self, process: psutil.Process) -> bool:
        """Whether it has the ranks of a host."""
        return name_of(process).startswith("ray::HostAgent")


class LinkedHosts(Hosts):
    """Ray's daemons in two namespaces, of which the second is cut off when it fails."""

    kinds = ("link",)

    def __init__(self, daemons: RayDaemons) -> None:
        self._daemons = daemons

    @property
    def words(self) -> tuple[str, str]:
        return self._daemons.words

    def start(self, folder: Path, *words: str) -> "subprocess.Popen[bytes]":
        prefix = self._daemons.hosts[0].prefix
        return driver(folder, *words, *self.words, f"hydra.sweep.dir={folder}", prefix=prefix)

    def fail_host(self) -> str:
        host = self._daemons.hosts[1]
        cut(host)
        return host.address


@contextmanager
def on_engine(engine: str, count: int, folder: Path) -> Iterator[Hosts]:
    """The hosts of an engine, until the end."""
    with ExitStack() as stack:
        if engine == "ray":
            yield stack.enter_context(hosts(count))
        else:
            apart = stack.enter_context(namespaces())
            yield LinkedHosts(stack.enter_context(ray_in(apart, folder.parent)))


@contextmanager
def hosts(count: int, gpus: int = 0) -> Iterator[Hosts]:
    """So many hosts, until the end."""
    made = Hosts(count, gpus)
    try:
        yield made
    finally:
        made.end()


def driver(folder: Path, *words: str, prefix: Sequence[str] = ()) -> "subprocess.Popen[bytes]":
    """A driver of a sweep; what it prints goes to a file beside its folder."""
    with folder.with_suffix(".log").open("ab") as log:
        command = (*prefix, sys.executable, "-m", "dcpbench", "-m", *words)
        # The tests' key is gone when they end; a sweep that goes on another day needs one that stays.
        environment = {name: value for name, value in os.environ.items() if name != "XDG_STATE_HOME"}
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)


def name_of(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""
