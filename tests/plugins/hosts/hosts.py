"""Several hosts on this machine: Ray's own simulated nodes, each with a loopback address of its own, or its
daemons in network namespaces."""

import os
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import psutil

import dcpbench
from conftest import Finished, wait_for
from dcpbench.config.schema import conf_folder
from plugins.hosts.namespaces import Namespace, end
from support.drivers import environment

_SMALL = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
_PORT = 6391
_ENDS_S = 60.0
_SWEEP_S = 300.0
_NOTICES = {
    "RAY_grpc_client_keepalive_time_ms": "5000",
    "RAY_grpc_client_keepalive_timeout_ms": "10000",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "10",
}
"""Variables that end a daemon without its head in half a minute; by default that takes eight."""
_RAY = (sys.executable, "-m", "ray.scripts.scripts")
_NO_DASHBOARD = "--include-dashboard=false"


def copy_dcpbench(place: Path, changed: bool = False) -> dict[str, str]:
    """Copy dcpbench to a folder; the variables with which another process imports that copy."""
    ours = Path(dcpbench.__file__).parent
    shutil.copytree(ours.parent, place / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(conf_folder(), place / "conf")
    if changed:
        (place / "src" / "dcpbench" / "changed.py").touch()
    return {"PYTHONPATH": str(place / "src")}


class Hosts:
    """A cluster whose hosts are named by their addresses, from 127.0.0.2 on."""

    def __init__(self, count: int) -> None:
        from ray.cluster_utils import Cluster

        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        self._last = 1
        self._cluster = Cluster()
        for _ in range(count):
            self.add()

    @property
    def words(self) -> tuple[str, str]:
        """Return the words that run a sweep on them."""
        return "executor=ray", f"executor.address={self._cluster.address}"

    def add(self, environment: dict[str, str] | None = None) -> None:
        """One more host, at the next address, with these variables in its environment."""
        self._last += 1
        address = f"127.0.0.{self._last}"
        self._newest = self._cluster.add_node(node_ip_address=address, env_vars=environment or {}, **_SMALL)

    def remove_newest(self) -> None:
        """Remove the host that was added last."""
        self._cluster.remove_node(self._newest)

    def kill(self) -> None:
        """Kill what Ray has started below this process."""
        for process in psutil.Process().children(recursive=True):
            if re.search(r"gcs_server|raylet|ray::", " ".join(process.cmdline())):
                process.kill()

    def end(self) -> None:
        """End all of them."""
        self._cluster.shutdown()


@contextmanager
def hosts(count: int) -> Iterator[Hosts]:
    """So many hosts, until the end."""
    with mock.patch.dict(os.environ, environment()):
        made = Hosts(count)
    try:
        yield made
    finally:
        made.end()


class RayDaemons:
    """Ray's daemons in network namespaces, which print to files in `folder`. Their head is in the first."""

    def __init__(self, hosts: Sequence[Namespace], folder: Path) -> None:
        self.hosts, self._folder = hosts, folder
        self._address = f"{hosts[0].address}:{_PORT}"
        self._running: list[subprocess.Popen[bytes]] = []

    @property
    def words(self) -> tuple[str, str]:
        """Overrides of a sweep on these hosts."""
        return "executor=ray", f"executor.address={self._address}"

    def start(self, host: Namespace) -> None:
        """Start a host, which joins the head unless it is the first."""
        is_first = host is self.hosts[0]
        joins = ["--head", f"--port={_PORT}", _NO_DASHBOARD] if is_first else [f"--address={self._address}"]
        small = [f"--{name.replace('_', '-')}={value}" for name, value in _SMALL.items()]
        words = [*_RAY, "start", "--block", f"--node-ip-address={host.address}", *joins, *small]
        log = self._folder / f"ray{len(self._running)}.log"
        with log.open("wb") as out:
            self._running.append(subprocess.Popen([*host.prefix, *words], stdout=out, stderr=out))
        wait_for(lambda: "Ray runtime started" in log.read_text(), _ENDS_S * 4)

    def driver(self, folder: Path, *words: str) -> "subprocess.Popen[str]":
        """A driver with these words, on the first host; it prints next to `folder`, where its sweep goes."""
        line = [*self.hosts[0].prefix, sys.executable, "-m", "dcpbench", *words, *self.words]
        with folder.with_suffix(".log").open("w") as log:
            return subprocess.Popen(
                line, stdout=log, stderr=subprocess.STDOUT, text=True, env=environment(), cwd=folder.parent
            )

    def run(self, folder: Path, *words: str) -> Finished:
        """Run a driver with these words to its end."""
        return ended(self.driver(folder, *words), folder)

    def end(self) -> None:
        """End all of them."""
        for host in self.hosts:
            end(host)
        for daemon in self._running:
            daemon.wait(_ENDS_S)


def ended(driver: "subprocess.Popen[str]", folder: Path) -> Finished:
    """The sweep of a driver in `folder`, once that has ended."""
    status = driver.wait(_SWEEP_S)
    return Finished(status, "", folder.with_suffix(".log").read_text(), folder)


@contextmanager
def ray_in(hosts: Sequence[Namespace], folder: Path) -> Iterator[RayDaemons]:
    """Ray's daemons in each namespace, until the end; no other user has their token."""
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    around = environment() | token | _NOTICES | {"RAY_USAGE_STATS_ENABLED": "0"}
    with mock.patch.dict(os.environ, around):
        made = RayDaemons(hosts, folder)
        try:
            for host in hosts:
                made.start(host)
            yield made
        finally:
            made.end()
