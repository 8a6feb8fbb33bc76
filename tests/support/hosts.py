"""Several hosts on this machine: Ray's own simulated nodes, each with a loopback address of its own, or its
daemons in network namespaces."""

import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest import mock

import psutil

import dcpbench
from conftest import wait_for
from dcpbench.config.schema import conf_folder
from support.drivers import environment
from support.namespaces import Namespace

_SMALL = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
_PORT = 6391
_ENDS_S = 60.0
_RAY = (sys.executable, "-m", "ray.scripts.scripts")
_NO_DELAY = {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0"}
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
        """What has a sweep run on them."""
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


@contextmanager
def ray_in(namespaces: Sequence[Namespace], folder: Path) -> Iterator[tuple[str, str]]:
    """Ray's daemons in each namespace, until the end, which write what they tell to `folder`; what has a
    sweep run on them that is started in the first one, from this process's environment."""
    address = f"{namespaces[0].address}:{_PORT}"
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    started: list[subprocess.Popen[bytes]] = []
    with mock.patch.dict(os.environ, {**token, **_NO_DELAY, "RAY_USAGE_STATS_ENABLED": "0"}):
        try:
            for one in namespaces:
                joins = [f"--address={address}"] if started else ["--head", f"--port={_PORT}", _NO_DASHBOARD]
                small = [f"--{name.replace('_', '-')}={value}" for name, value in _SMALL.items()]
                words = [*_RAY, "start", "--block", f"--node-ip-address={one.address}", *joins, *small]
                told = folder / f"{one.name}.log"
                with told.open("wb") as log:
                    process = subprocess.Popen([*one.prefix, *words], stdout=log, stderr=log)
                started.append(process)
                wait_for(partial(_is_up, told))
            yield "executor=ray", f"executor.address={address}"
        finally:
            for daemon in reversed(started):
                daemon.send_signal(signal.SIGTERM)
                daemon.wait(_ENDS_S)


def _is_up(told: Path) -> bool:
    return "Ray runtime started" in told.read_text()
