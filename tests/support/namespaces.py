"""Two hosts on this machine as two network namespaces with a link between them. Needs root."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import NoReturn

import pytest

LINK = "link0"
"""The end of the link in each of them."""


@dataclass(frozen=True)
class Namespace:
    """A host by the name of its namespace, and its address."""

    name: str
    address: str

    @property
    def prefix(self) -> tuple[str, ...]:
        """What has a command run there, with mounts of its own."""
        return ("ip", "netns", "exec", self.name)


@contextmanager
def namespaces() -> Iterator[list[Namespace]]:
    """Two of them, until the end."""
    hosts = [Namespace(f"dcpbench{os.getpid()}-{number}", f"10.77.0.{1 + number}") for number in range(2)]
    try:
        try:
            for host in hosts:
                _ip("netns", "add", host.name)
            ends = ("netns", hosts[0].name, "type", "veth", "peer", "name", LINK, "netns", hosts[1].name)
            _ip("link", "add", LINK, *ends)
        except (OSError, subprocess.CalledProcessError) as error:
            not_here(f"network namespaces cannot be made here; run as root, where that may: {error}")
        for host in hosts:
            _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", LINK)
            for interface in ("lo", LINK):
                up(host, interface)
        yield hosts
    finally:
        for host in hosts:
            with suppress(OSError, subprocess.CalledProcessError):
                _ip("netns", "delete", host.name)


def not_here(why: str) -> NoReturn:
    """Skip a test that this machine cannot run; in CI, where it is to run, it fails."""
    (pytest.fail if os.environ.get("CI") else pytest.skip)(why)


def up(host: Namespace, interface: str = LINK) -> None:
    """Have an interface carry packets, again."""
    _ip("-n", host.name, "link", "set", interface, "up")


def cut(host: Namespace) -> None:
    """Have nothing get to a host any more, or from it."""
    _ip("-n", host.name, "link", "set", LINK, "down")


def processes_in(host: Namespace) -> list[str]:
    """The pids of what runs there."""
    return _ip("netns", "pids", host.name).split()


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout
