"""torchrun on several hosts: as many of its processes on this one, which meet at an address."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from conftest import Finished, words_of
from support.drivers import environment

Host = tuple[str, tuple[str, ...]]
"""Its address, and what stands before a command that is to run there."""
HERE: list[Host] = [("127.0.0.1", ())] * 2


class Torchrun:
    """Hosts with two processes each, for a sweep into `folder`, which write what they tell beside it."""

    def __init__(
        self, folder: Path, overrides: Sequence[str], max_restarts: int, hosts: Sequence[Host]
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            endpoint = f"{hosts[0][0]}:{free.getsockname()[1]}"
        options = f"--nnodes {len(hosts)} --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint {endpoint}"
        options += f" --rdzv-id {os.getpid()} --max-restarts {max_restarts}"
        program = [sys.executable, "-m", "torch.distributed.run", *options.split()]
        self._folder, self._hosts = folder, list[subprocess.Popen[bytes]]()
        self.log = folder.with_suffix(".log")
        for number, (address, prefix) in enumerate(hosts):
            with self.log.open("ab") as log:
                # The name of this machine says of none of them which it is.
                own = (f"--rdzv-conf=is_host={int(number == 0)}", f"--local-addr={address}", "-m", "dcpbench")
                words = [*prefix, *program, *own, *words_of(folder, *overrides)]
                host = subprocess.Popen(words, stdout=log, stderr=log, env=environment(), cwd=folder.parent)
                self._hosts.append(host)

    def end(self) -> None:
        """End it as a scheduler does."""
        for host in self._hosts:
            host.send_signal(signal.SIGTERM)

    def ended(self, timeout_s: float = 240) -> Finished:
        """Wait for its end."""
        status = max(host.wait(timeout_s) for host in self._hosts)
        return Finished(status, "", self.log.read_text(), self._folder)

    def kill(self) -> None:
        """End what is left of it."""
        for host in self._hosts:
            host.kill()
            host.wait()


@contextmanager
def torchrun(
    folder: Path, *overrides: str, max_restarts: int = 0, hosts: Sequence[Host] = HERE
) -> Iterator[Torchrun]:
    """Two hosts, until the end."""
    made = Torchrun(folder, overrides, max_restarts, hosts)
    try:
        yield made
    finally:
        made.kill()


def driver_of(folder: Path) -> psutil.Process | None:
    """The driver of a sweep, once there is one."""
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if "executor=torchrun" in line and any(str(folder) in word for word in line):
            return process
    return None
