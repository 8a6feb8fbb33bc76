"""Sweeps that start at once: every driver is a separate process, but forked, not started from scratch.

`python -m dcpbench` imports Hydra, and the fork server of its ranks torch and the compiler: four to six
seconds of work for each of the many sweeps of the tests. One server, kept for the whole test session, has
all of it imported. A driver is forked from that server, and its own fork server from the driver. Pids,
signals, the environment, the folder, the exit status and what is printed are those of a driver of a shell;
only that modules are loaded already is not, and tests that are about imports start a python of their own.
"""

import faulthandler
import importlib
import multiprocessing
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import dropwhile
from multiprocessing import forkserver, process, reduction, resource_tracker, util
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any
from unittest import mock

import psutil

from dcpbench.rank.messages import Descriptor

_LIBRARY = tuple(map(Path, dropwhile(lambda place: not place.endswith(".zip"), sys.path)))
"""Entries of `sys.path` after the folder and PYTHONPATH; paths, as a rank would report texts that differ."""
_TESTS = Path(__file__).parents[1]
_ENDED_S = 10.0
_STACKS_S = 1.0

compiles = True
"""Whether the server imports the compiler too."""
may_start = True
"""Whether the test that runs may start a driver, which takes seconds."""


def environment(*places: Path, **variables: str) -> dict[str, str]:
    """This process's environment with these variables, modules in these folders, and the tests' own scenarios
    importable."""
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    searched = filter(None, [*map(str, places), str(_TESTS), *before])  # an empty one would be the folder
    return {**os.environ, **variables, "PYTHONPATH": os.pathsep.join(searched)}


_restarted = forkserver.ForkServer()
"""The server of the second interpreters of drivers, with another hash seed."""


def start_server() -> ForkServerContext:
    """The context whose processes are forked from the server, which is started if it does not run yet and
    then lives as long as this process. In its environment is set what a driver sets for its own."""
    if forkserver._forkserver._forkserver_pid is None:
        _start(forkserver._forkserver)
    return multiprocessing.get_context("forkserver")


def _start(server: forkserver.ForkServer, **variables: str) -> None:
    from dcpbench import SAFE_PATH
    from dcpbench.executors import fork_server

    imported = [
        "dcpbench.cli.by_hydra",
        "dcpbench.cli.engine",
        "dcpbench.cli.run",
        "dcpbench.sweep.run",
        "dcpbench.report.document",
        "dcpbench.report.show",
        "dcpbench.scenarios.save_load",
        "dcpbench.workloads.models",
        "dcpbench.workloads.parallelisms",
        __name__,
        *(["support.compile_once"] if compiles else []),
        "support.read_once",
    ]
    # The plug-ins of a test are its drivers' alone.
    with mock.patch.dict(os.environ, environment(DCPBENCH_PLUGINS="", **variables)):
        with mock.patch.object(forkserver, "ensure_running"):
            context = fork_server.fork_server(fork_server.rank_imports(compiles))
        os.environ.pop(SAFE_PATH[0])  # else it applies to every process forked from the server
        context.set_forkserver_preload([*forkserver._forkserver._preload_modules, *imported])
        server.set_forkserver_preload([*forkserver._forkserver._preload_modules])
        with fork_server.fixed_addresses():
            server.ensure_running()


def cpu_seconds() -> float:
    """CPU seconds of this process and of those that it has waited for. If the test that runs may start a
    driver, also of drivers and ranks that ended: some end after their test."""
    used = sum(os.times()[:4])
    if may_start and (server := forkserver._forkserver._forkserver_pid):
        used += sum(psutil.Process(server).cpu_times()[:4])
    return used


def plant(module: str, name: str, value: object) -> None:
    """What a driver may be told to `prepare`: another value of a module's, in it and in its ranks."""
    setattr(importlib.import_module(module), name, value)


class Driver:
    """`python -m dcpbench` with these words, in a session of its own; used as `subprocess.Popen` is.

    Args:
        prepare: called in the driver's process before anything else: what a test plants there.
    """

    def __init__(
        self,
        words: Sequence[str],
        cwd: Path,
        prepare: Callable[[], object] | None = None,
    ) -> None:
        assert may_start, "a test that starts a driver is `slow`"
        context = start_server()
        may_restart = any("target=" in word or word.startswith("restart=") for word in words)
        if _restarted._forkserver_pid is None and may_restart and "PYTHONHASHSEED" not in os.environ:
            _start(_restarted, PYTHONHASHSEED="1")
        pipes = [context.Pipe(duplex=False) for _ in range(2)]
        self._reads = [here for here, _ in pipes]
        self._process = context.Process(
            target=_drive,
            args=(
                *(words, str(cwd), environment(), [there for _, there in pipes]),
                *(_restarted._forkserver_address, prepare),
            ),
        )
        self._process.start()
        for _, there in pipes:
            there.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        """Its exit status, None while it runs."""
        return self._process.exitcode

    def kill(self) -> None:
        """Kill this one process."""
        self._process.kill()

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Return its output and that of its children, once none of them can print.

        Raises:
            subprocess.TimeoutExpired: that took too long; it was killed.
        """
        said = {read.fileno(): b"" for read in self._reads}
        deadline = time.monotonic() + timeout
        try:
            with selectors.DefaultSelector() as waiting:
                for file in said:
                    waiting.register(file, selectors.EVENT_READ)
                while waiting.get_map():
                    if (left := deadline - time.monotonic()) <= 0:
                        expired = subprocess.TimeoutExpired("dcpbench", timeout, *said.values())
                        expired.add_note(self._what_runs(waiting, said))
                        raise expired
                    _read(waiting, left, said)
            self._process.join(max(0.0, deadline - time.monotonic()))
        finally:
            self.close()
        out, err = (each.decode() for each in said.values())
        return out, err

    def _what_runs(self, waiting: selectors.BaseSelector, said: dict[int, bytes]) -> str:
        """Return the processes that can still print, the output, and the stacks of driver and fork server."""
        pipes = {f"pipe:[{os.fstat(read.fileno()).st_ino}]" for read in self._reads}
        lines = []
        for one in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                opened = {str(link.readlink()) for link in Path(f"/proc/{one.pid}/fd").iterdir()}
                if one.pid != os.getpid() and not pipes.isdisjoint(opened):
                    words = " ".join(one.cmdline())[:80]
                    lines.append(f"{one.pid}, of {one.ppid()}: {one.status()}: {words}")
                    if one.pid == self.pid or one.ppid() == self.pid:
                        one.send_signal(signal.SIGUSR1)
        while waiting.get_map() and _read(waiting, _STACKS_S, said):
            pass
        return "\n".join([*lines, *(each.decode(errors="replace") for each in said.values())])

    def close(self) -> None:
        """End it if it still runs, and forget what it had to say."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.join(_ENDED_S)
        for read in self._reads:
            read.close()


def _read(waiting: selectors.BaseSelector, limit_s: float, said: dict[int, bytes]) -> bool:
    """Read what there is to read, once there is something; whether there was, in that time."""
    ready = waiting.select(limit_s)
    for key, _ in ready:
        said[key.fd] += (more := os.read(key.fd, 65536))
        if not more:
            waiting.unregister(key.fd)
    return bool(ready)


def _drive(
    words: Sequence[str],
    cwd: str,
    variables: dict[str, str],
    writes: list[Connection],
    restarted: str | None,
    prepare: Callable[[], object] | None,
) -> None:
    os.setsid()
    for file, write in zip((1, 2), writes, strict=True):
        os.dup2(write.fileno(), file)
        write.close()
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    _forget_server()
    globals()["__file__"] = "drivers.py"  # else ranks forked from here have it as a module of the user's
    from dcpbench.cli import engine
    from dcpbench.executors import interpreters

    if restarted:
        interpreters._agent = partial(_forked_agent, restarted, interpreters._agent)
    os.chdir(cwd)
    if prepare:
        prepare()
    engine.drive(words, cwd, variables, [*map(str, _LIBRARY)])


class _Agent:
    """A process of the second interpreter; used as `subprocess.Popen` is."""

    def __init__(self, process: process.BaseProcess) -> None:
        self._process, self.pid = process, process.pid

    def wait(self, timeout: float | None = None) -> None:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("the second interpreter", timeout or 0.0)


def _forked_agent(
    address: str, start: Callable[..., Any], python: str, connection: Connection, variables: dict[str, str]
) -> Any:
    """Start the second interpreter of a driver: fork it from the server that has imported everything."""
    if python != sys.executable or variables["PYTHONHASHSEED"] != "1":
        return start(python, connection, variables)

    def connect(files: list[int]) -> tuple[int, int]:
        """`ForkServer.connect_to_new_process` of a server of another process."""
        with socket.socket(socket.AF_UNIX) as client, open(os.devnull) as nothing:  # noqa: PTH123
            client.connect(address)
            (parent_r, child_w), (child_r, parent_w) = os.pipe(), os.pipe()
            reduction.sendfds(client, [child_r, child_w, nothing.fileno(), nothing.fileno(), *files])
            os.close(child_r)
            os.close(child_w)
            return parent_r, parent_w

    arguments = connection, variables, [Descriptor(1), Descriptor(2)]
    agent = multiprocessing.get_context("forkserver").Process(target=_serve_as_agent, args=arguments)
    with mock.patch.object(forkserver, "connect_to_new_process", connect):
        agent.start()
    return _Agent(agent)


def _serve_as_agent(connection: Connection, variables: dict[str, str], prints: list[Descriptor]) -> None:
    os.setsid()
    for file, print_to in zip((1, 2), prints, strict=True):
        os.dup2(print_to.number, file)
        os.close(print_to.number)
    _forget_server()
    os.environ.clear()
    os.environ.update(variables)
    from dcpbench.cli import engine
    from dcpbench.executors import interpreter_agent

    util.spawnv_passfds = engine.forked_server

    interpreter_agent.main(connection.fileno())


def _forget_server() -> None:
    """Make this process one that has yet to start multiprocessing's helpers, and forks them when it does."""
    for held in {forkserver._forkserver._forkserver_alive_fd, resource_tracker._resource_tracker._fd}:
        os.close(held)
    forkserver._forkserver.__init__()
    resource_tracker._resource_tracker.__init__()
    process.current_process()._config.pop("tempdir", None)
