"""Sweeps that start at once: every driver is a separate process, but forked, not started from scratch.

`python -m dcpbench` imports Hydra, and the agent of its ranks torch and the compiler: four to six seconds of
work for each of the many sweeps of the tests. One agent, kept for the whole test session, has all of it
imported, and each worker of pytest forks its own from there. A driver is forked from the agent of a worker,
and its own agent from the driver. Pids, signals, the environment, the folder, the exit status and what is
printed are those of a driver of a shell; only that modules are loaded already is not, and tests about imports
start a python of their own.
"""

import faulthandler
import importlib
import os
import pickle
import re
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from multiprocessing import Pipe, current_process
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize, get_temp_dir
from pathlib import Path
from typing import Any
from unittest import mock

import psutil

from dcpbench import SAFE_PATH
from dcpbench.executors import agent as agents
from dcpbench.executors.agent import Agent, Forked, agent_of
from dcpbench.executors.machine import rank_imports
from dcpbench.rank import agent as forked_agent
from dcpbench.rank.messages import Descriptor

_TESTS = Path(__file__).parents[1]
_PATH = [*sys.path]
"""That of an agent, before it has forked anything."""
_DRIVER = (
    "dcpbench.cli.by_hydra",
    "dcpbench.cli.engine",
    "dcpbench.cli.run",
    "dcpbench.sweep.run",
    "dcpbench.report.document",
    "dcpbench.report.show",
    "dcpbench.scenarios.save_load",
    "dcpbench.workloads.models",
    "dcpbench.workloads.parallelisms",
)
_ENDED_S = 10.0
_STACKS_S = 1.0

compiles = True
"""Whether the agents import the compiler too."""
may_start = True
"""Whether the test that runs may start a driver, which takes seconds."""
shared: str | None = None
"""The socket of the process whose agents this one's are forked from; without one they start by themselves."""


def environment(*places: Path, **variables: str) -> dict[str, str]:
    """This process's environment with these variables, modules in these folders, and the tests' own scenarios
    importable."""
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    searched = filter(None, [*map(str, places), str(_TESTS), *before])  # an empty one would be the folder
    return {**os.environ, **variables, "PYTHONPATH": os.pathsep.join(searched)}


def _agent(seed: str, *preloaded: str) -> Agent:
    """The agent with this hash seed, with these modules too; it lives as long as this process."""

    def variables() -> dict[str, str]:
        # The plug-ins of a test are its drivers' alone.
        own = {agents.HASH_SEED: seed, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        given = agents.ENVIRONMENT | environment(DCPBENCH_PLUGINS="", **own)
        given.pop(SAFE_PATH[0])  # else it applies to every process forked from the agent
        ours = [*_DRIVER, __name__, *(preloaded if compiles else ()), "support.read_once"]
        imported[:] = [agents.PROBE, *rank_imports(compiles), *ours]
        return given

    def begin() -> tuple[Connection, Any]:
        if not shared:
            return own._begin()
        with socket.socket(socket.AF_UNIX) as asking:
            asking.connect(shared)
            asking.send(pickle.dumps((seed, compiles)))
            _, (door,), _, _ = socket.recv_fds(asking, 1, 1)
        here, there = Pipe()
        with there:
            process = _fork_agent(_agent_behind(door), there, variables(), _PATH)
        here.send((bytes(current_process().authkey), get_temp_dir(), sys.argv, imported))
        return here, process

    imported = list[str]()
    own = agent_of(sys.executable, imported, variables)
    return Agent(begin)


first, restarted = _agent("0", "support.compile_once"), _agent("1")
"""The agents that fork drivers, and other processes, and the second interpreters of drivers."""


@cache
def share() -> str:
    """Let other processes fork their agents from this one's; the socket for their `shared`."""

    def serve() -> None:
        global compiles
        while True:
            worker, _ = asked.accept()
            with worker:
                seed, compiles = pickle.loads(worker.recv(64))
                agent = {"0": first, "1": restarted}[seed]
                agent.start()
                socket.send_fds(worker, [b"."], [agent._door.fileno()])

    asked = socket.socket(socket.AF_UNIX)
    asked.bind(path := f"{get_temp_dir()}/agents")
    asked.listen()
    threading.Thread(target=serve, daemon=True).start()
    return path


def _agent_behind(door: int) -> Agent:
    """The agent of another process, by this descriptor of its connection."""
    return Agent(lambda: (Connection(door), mock.Mock()))


def cpu_seconds() -> float:
    """CPU seconds of this process and of those that it has waited for. If the test that runs may start a
    driver, also of drivers and ranks that ended: some end after their test."""
    used = sum(os.times()[:4])
    if may_start and first.runs():
        used += sum(psutil.Process(first.pid).cpu_times()[:4])
    return used


def plant(module: str, name: str, value: object) -> None:
    """What a driver may be told to `prepare`: another value of a module's, in it and in its ranks."""
    setattr(importlib.import_module(module), name, value)


def without_reports(prepare: Callable[[], object] | None) -> None:
    """Prepare a driver that writes no page and no junit.xml, which cost as much as a pretended cell."""
    plant("dcpbench.report.show", "write_reports", lambda *_: None)
    if prepare:
        prepare()


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
        may_restart = any(re.match(r"(?!executor).*target=|restart=", word) for word in words)
        if may_restart and "PYTHONHASHSEED" not in os.environ:
            restarted.start()
        reads, writes = zip(*(os.pipe() for _ in range(2)), strict=True)
        self._reads = [open(read, "rb", buffering=0) for read in reads]  # noqa: PTH123, SIM115
        doors = [restarted._door.fileno()] if restarted.runs() else []
        passed = [*map(Descriptor, (*writes, *doors))]
        _, self._process = fork(_drive, words, str(cwd), environment(), prepare, passed=passed)
        for write in writes:
            os.close(write)

    @property
    def pid(self) -> int:
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
            self._process.wait(max(0.0, deadline - time.monotonic()))
        finally:
            self.close()
        out, err = (each.decode() for each in said.values())
        return out, err

    def _what_runs(self, waiting: selectors.BaseSelector, said: dict[int, bytes]) -> str:
        """Return the processes that can still print, the output, and the stacks of driver and agent."""
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
        self._process.wait(_ENDED_S)
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


def fork(
    function: Callable[..., object],
    *arguments: object,
    passed: Sequence[Descriptor] = (),
    agent: Agent = first,
) -> tuple[Connection, Forked]:
    """Fork a process, which calls a function of any module that can be imported here, with a connection, what
    is passed and the arguments. Return the other end."""
    return agent.fork(__name__, [*sys.path], pickle.dumps((function, arguments)), passed)


def main(connection: Connection, path: list[str], asked: bytes, passed: Sequence[Descriptor]) -> None:
    """Call a function in a process that an agent has forked."""
    globals()["__file__"] = "drivers.py"  # else ranks forked from here have it as a module of the user's
    sys.path[:] = path
    function, arguments = pickle.loads(asked)
    function(connection, passed, *arguments)


def _drive(
    _: Connection,
    passed: Sequence[Descriptor],
    words: Sequence[str],
    cwd: str,
    variables: dict[str, str],
    prepare: Callable[[], object] | None,
) -> None:
    os.setsid()
    out, err, *doors = passed
    _print_to(out, err)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    from dcpbench.cli import engine

    if doors:
        engine.forked = partial(_forked_agent, _agent_behind(doors[0].number), engine.forked)
    os.chdir(cwd)
    if prepare:
        prepare()
    sys.path[:] = _PATH
    engine.drive(words, cwd, variables)


def _print_to(*prints: Descriptor) -> None:
    for file, print_to in zip((1, 2), prints, strict=True):
        os.dup2(print_to.number, file)
        os.close(print_to.number)


def _forked_agent(
    again: Agent,
    start: Callable[..., Any],
    python: str,
    door: Connection,
    variables: Mapping[str, str],
    path: Sequence[str],
) -> subprocess.Popen[bytes] | Forked:
    """Start the second interpreter of a driver: fork it from the agent that has imported everything."""
    if python != sys.executable or variables.get(agents.HASH_SEED) != "1":
        return start(python, door, variables, path)
    from dcpbench.executors import cleanup

    process = _fork_agent(again, door, variables, path)
    descendants = cleanup._descendants

    def with_those_of_the_agent() -> list[psutil.Process]:
        with suppress(psutil.NoSuchProcess):
            return [*descendants(), *psutil.Process(process.pid).children(recursive=True)]
        return descendants()

    cleanup._descendants = with_those_of_the_agent
    return process


def _fork_agent(of: Agent, door: Connection, variables: Mapping[str, str], path: Sequence[str]) -> Forked:
    """Fork an agent from one that has imported everything."""
    passed = [Descriptor(number) for number in (door.fileno(), 1, 2)]
    return fork(_be_agent, str(Path.cwd()), dict(variables), [*path], passed=passed, agent=of)[1]


def _be_agent(
    _: Connection,
    passed: Sequence[Descriptor],
    cwd: str,
    variables: dict[str, str],
    path: list[str],
) -> None:
    from dcpbench.executors import cleanup

    os.setsid()
    door, *prints = passed
    _print_to(*prints)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(variables)
    sys.path[:] = path
    cleanup.adopt_orphans()
    Finalize(None, cleanup.end_orphans, exitpriority=0)
    forked_agent.begin(Connection(door.number))
