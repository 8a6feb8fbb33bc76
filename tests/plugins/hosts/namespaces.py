"""Two hosts on this machine as two network namespaces with a link between them. Needs root."""

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import psutil
import pytest

from plugins.hosts import slow_link

LINK = "link0"
"""The end of the link in each of them."""
_numbers = itertools.count()


@dataclass(frozen=True)
class Namespace:
    """A host by the name of its namespace, and its address."""

    name: str
    address: str
    also: tuple[str, ...] = ()
    """Words before a command that change more of where it runs."""

    @property
    def prefix(self) -> tuple[str, ...]:
        """Words before a command that run it there, with mounts of its own."""
        return ("ip", "netns", "exec", self.name, *self.also)


@contextmanager
def namespaces() -> Iterator[list[Namespace]]:
    """Two of them, until the end."""
    with _unlinked() as hosts:
        ends = ("netns", hosts[0].name, "type", "veth", "peer", "name", LINK, "netns", hosts[1].name)
        with _where_it_may():
            _ip("link", "add", LINK, *ends)
        _addressed(hosts)
        yield hosts


@contextmanager
def slowly_linked(delay_s: float, loss: float) -> Iterator[list[Namespace]]:
    """Two of them, until the end; between them each packet takes so long, and this part of them is lost."""
    with _unlinked() as hosts:
        asked = (*(host.name for host in hosts), LINK, str(delay_s), str(loss))
        line = [sys.executable, str(Path(slow_link.__file__)), *asked]
        with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as link:
            assert link.stdout is not None
            with _where_it_may():
                if not link.stdout.readline():
                    raise OSError("no TUN device")
            _addressed(hosts)
            yield hosts
            assert link.poll() is None, "the link has ended"


@contextmanager
def _unlinked() -> Iterator[list[Namespace]]:
    names = [f"dcpbench{os.getpid()}-{next(_numbers)}" for _ in range(2)]
    hosts = [Namespace(name, f"10.77.0.{1 + number}") for number, name in enumerate(names)]
    try:
        with _where_it_may():
            for host in hosts:
                _ip("netns", "add", host.name)
        yield hosts
    finally:
        for host in hosts:
            with suppress(OSError, subprocess.CalledProcessError):
                _ip("netns", "delete", host.name)


@contextmanager
def _where_it_may() -> Iterator[None]:
    try:
        yield
    except (OSError, subprocess.CalledProcessError) as error:
        not_here(f"network namespaces cannot be made here; run as root, where that may: {error}")


def _addressed(hosts: list[Namespace]) -> None:
    for host in hosts:
        _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", LINK)
        for interface in ("lo", LINK):
            up(host, interface)


def not_here(why: str) -> NoReturn:
    """Skip a test that this machine cannot run; in CI, where it is to run, it fails."""
    (pytest.fail if os.environ.get("CI") else pytest.skip)(why)


def up(host: Namespace, interface: str = LINK) -> None:
    """Make an interface carry packets again."""
    _ip("-n", host.name, "link", "set", interface, "up")


def cut(host: Namespace) -> None:
    """Cut a host off the network."""
    _ip("-n", host.name, "link", "set", LINK, "down")


def processes_in(host: Namespace) -> list[psutil.Process]:
    """The processes that run there."""
    found = []
    for pid in _ip("netns", "pids", host.name).split():
        with suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(int(pid)))
    return found


def end(host: Namespace) -> None:
    """Kill whatever runs there, as when a machine is switched off."""
    for process in processes_in(host):
        with suppress(psutil.NoSuchProcess):
            process.kill()


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout
