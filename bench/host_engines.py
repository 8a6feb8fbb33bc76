"""The hosts that `bench/hosts.py` runs sweeps on, and what may fail of them."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.elastic import Torchrun, driver_of, torchrun
from support.hosts import ray_in
from support.namespaces import Namespace, cut, namespaces, up

OBJECT_STORE_BYTES = 80 * 2**20
MENDED_S = 10.0
"""How long a link is cut: longer than until its host is given up."""


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

    def driver(self, _: Path, started: Any) -> Any:
        """The driver of a sweep that was started."""
        return started

    def fail_host(self) -> str:
        """End a host, for which another one comes; which."""
        node = self.nodes[-1]
        self.remove(node)
        self.add()
        return str(node.node_ip_address)

    def is_agent(self, process: psutil.Process) -> bool:
        """Whether it has the ranks of a host."""
        return name_of(process).startswith("ray::HostAgent")

    def mend(self) -> None:
        """Undo what failed, where it is to be; called again and again."""


class LinkedHosts(Hosts):
    """Ray's daemons in two namespaces, of which the second is cut off when it fails."""

    kinds = ("link",)

    def __init__(self, apart: Sequence[Namespace], words: tuple[str, str]) -> None:
        self._apart, self._words = apart, words

    @property
    def words(self) -> tuple[str, str]:
        return self._words

    def start(self, folder: Path, *words: str) -> "subprocess.Popen[bytes]":
        return driver(folder, *words, *self.words, f"hydra.sweep.dir={folder}", prefix=self._apart[0].prefix)

    def fail_host(self) -> str:
        cut(self._apart[1])
        return self._apart[1].address


class TorchrunHosts(LinkedHosts):
    """torchrun in two namespaces. Its processes have a rank each, and start a driver where one was killed."""

    kinds = ("rank killed", "agent killed", "link", "agent stopped", "driver", "rank stopped")
    most_s = 60.0  # of which torchrun takes most, to start its processes anew

    def __init__(self, apart: Sequence[Namespace], stack: ExitStack) -> None:
        super().__init__(apart, ("", ""))
        self._stack, self._mends_at = stack, 0.0

    def start(self, folder: Path, *words: str) -> Any:
        two = [(one.address, one.prefix) for one in self._apart]
        made = torchrun(folder, "-m", *words, max_restarts=1000, hosts=two)
        return _Elastic(self._stack.enter_context(made))

    def driver(self, folder: Path, started: Any) -> Any:
        return driver_of(folder)

    def is_agent(self, process: psutil.Process) -> bool:
        with suppress(psutil.Error):
            return "torch.distributed.run" in name_of(process.parent()) and "dcpbench" in name_of(process)
        return False

    def fail_host(self) -> str:
        self._mends_at = time.monotonic() + MENDED_S
        return super().fail_host()

    def mend(self) -> None:
        if 0 < self._mends_at <= time.monotonic():
            up(self._apart[1])
            self._mends_at = 0.0


@dataclass
class _Elastic:
    """A sweep on torchrun, in the words of a process that is a driver."""

    run: Torchrun

    def poll(self) -> int | None:
        """0 once the sweep has ended; torchrun itself would start its processes again, to no effect."""
        if "written to" not in self.run.log.read_text():
            return None
        self.run.end()
        self.wait()
        return 0

    def send_signal(self, _: int) -> None:
        self.run.end()

    def wait(self) -> None:
        self.run.ended()


@contextmanager
def on_engine(engine: str, count: int, folder: Path) -> Iterator[Hosts]:
    """The hosts of an engine, until the end."""
    with ExitStack() as stack:
        if engine == "ray":
            yield stack.enter_context(hosts(count))
            return
        apart = stack.enter_context(namespaces())
        if engine == "torchrun":
            yield TorchrunHosts(apart, stack)
        else:
            yield LinkedHosts(apart, stack.enter_context(ray_in(apart, folder.parent)))


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
