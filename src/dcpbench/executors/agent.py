"""The driver's end of agents (`dcpbench.rank.agent`), from which every rank is forked: one of this Python,
one of each other interpreter, and those which have imported a user's packages too."""

import ctypes
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import Pipe, current_process
from multiprocessing.connection import Connection
from multiprocessing.util import get_temp_dir
from typing import Any

import dcpbench
from dcpbench.core.rank_report import Imports
from dcpbench.rank.agent import pickled

HASH_SEED = "PYTHONHASHSEED"
ENVIRONMENT = dict([dcpbench.SAFE_PATH]) | {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # cuBLAS, where deterministic=true
    # Cache keys of compiled graphs with a device mesh contain Python hashes: with a random hash seed, a
    # sweep would not find the graphs of an earlier one.
    HASH_SEED: "0",
    "OMP_NUM_THREADS": "1",  # ranks share the cores, as under torchrun
    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # no leaked worker pools
    "GLOO_SOCKET_IFNAME": "lo",
}
"""Variables of every rank; those set by the user are kept."""

ANSWER_LIMIT_S = 120.0
"""Time limit for an agent to fork a process; before the first one it imports torch."""
_END_S = 4.0
PROBE = "dcpbench.rank.machine_probe"
_IMPORTS = "dcpbench.rank.imports"
_LOST = 255
"""Exit status of a process whose agent has died: it died too."""
_START = "import sys; sys.path[:] = sys.argv[1:] or sys.path; from dcpbench.rank.agent import main; main()"


class Forked:
    """A process that an agent has forked."""

    def __init__(self, pid: int, reports: Connection) -> None:
        self.pid = pid
        self.sentinel = reports
        """Readable when the process has exited."""
        self._exitcode: int | None = None

    @property
    def exitcode(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        self.wait(0)
        return self._exitcode

    def is_alive(self) -> bool:
        return self.exitcode is None

    def wait(self, timeout: float | None = None) -> None:
        """Wait for its end, up to a limit."""
        if self._exitcode is None and self.sentinel.poll(timeout):
            try:
                self._exitcode = self.sentinel.recv()
            except (EOFError, OSError):
                self._exitcode = _LOST

    def kill(self) -> None:
        if self.is_alive():
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


Process = subprocess.Popen[bytes] | Forked


class Agent:
    """An agent. It starts with the first process that it has to fork, or earlier by `start`, and again after
    it has died.

    Args:
        begin: starts its process, and returns its connection.
    """

    def __init__(self, begin: Callable[[], tuple[Connection, Process]]) -> None:
        self._begin = begin
        self._lock, self._forking = threading.RLock(), threading.Lock()
        self._process: Process | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def runs(self) -> bool:
        """Return whether it runs; it sends nothing, so only its end can be read."""
        return self._process is not None and not self._door.closed and not self._door.poll()

    def start(self) -> None:
        """Start it, so that it imports in the background, unless it runs.

        Raises:
            OSError: it cannot be started.
        """
        with self._lock:
            if not self.runs():
                self.kill()
                self._door, self._process = self._begin()
                self._importing: dict[Imports, Agent] = {}

    def fork(self, module: str, *arguments: Any) -> tuple[Connection, Forked]:
        """Fork a process, which calls `main` of a module with a connection and these arguments. Return the
        other end. If the agent does not answer, as after SIGSTOP, it is killed, and all with it.

        Raises:
            OSError: it cannot be started.
            EOFError: it did not answer, or died.
        """
        here, there = Pipe()
        reports, reported = Pipe(duplex=False)
        request, files = pickled((module, arguments))
        with there, reported, self._lock:
            self.start()
            with socket.socket(fileno=os.dup(self._door.fileno())) as door, suppress(ConnectionError):
                socket.send_fds(door, [b"."], [reported.fileno(), there.fileno(), *files])
        if not reports.poll(ANSWER_LIMIT_S):
            self.kill()
            raise EOFError(f"no process was forked within {ANSWER_LIMIT_S:.0f} s")
        try:
            process = Forked(reports.recv(), reports)
        except EOFError:
            raise EOFError("the process that forks them exited") from None
        with suppress(ConnectionError):  # it died
            here.send_bytes(request)
        return here, process

    def importing(self, imports: Imports) -> "Agent":
        """Return an agent, forked from this one, that has imported these packages; this one if there are
        none, or if that has exited, as it does if it cannot be used.

        Raises:
            OSError, EOFError: it could not be forked.
        """
        with self._forking:
            self.start()
            if imports.modules and imports not in self._importing:
                agent = self._importing[imports] = Agent(partial(self.fork, _IMPORTS, imports))
                agent.start()
                with suppress(EOFError):
                    if not (agent._door.poll(ANSWER_LIMIT_S) and agent._door.recv()):
                        agent.kill()
        importer = self._importing.get(imports)
        return importer if importer and importer.runs() else self

    def kill(self) -> None:
        """Kill it, if it runs, and with it all that it has forked."""
        if self._process:
            self._process.kill()
            self._process.wait()
            self._door.close()

    def end(self) -> None:
        """Let it exit, and wait for that."""
        if self._process:
            self._door.close()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)
            self.kill()


def agent_of(
    python: str,
    modules: Sequence[str],
    environment: Callable[[], Mapping[str, str]] = lambda: os.environ,
    path: Callable[[], Sequence[str]] = tuple,
) -> Agent:
    """Return the agent of a Python.

    Args:
        modules: are imported at its start; those that are missing are left to what needs them.
        environment: returns its variables.
        path: returns where it searches for modules; nothing if that is what its environment says.
    """

    def begin() -> tuple[Connection, Process]:
        here, there = Pipe()
        with there:
            process = spawn(python, there, environment(), path())
        with suppress(ConnectionError):  # it has exited
            here.send((bytes(current_process().authkey), get_temp_dir(), sys.argv, modules))
        return here, process

    return Agent(begin)


def spawned(python: str, door: Connection, environment: Mapping[str, str], path: Sequence[str]) -> Process:
    """Start the process of an agent, with its end of a connection."""
    with _fixed_addresses():
        return subprocess.Popen(
            [python, "-c", _START, *path],
            stdin=door.fileno(),
            env=environment,
            start_new_session=True,  # the driver obeys Ctrl-C
        )


spawn: Callable[[str, Connection, Mapping[str, str], Sequence[str]], Process] = spawned
"""Starts an agent. A driver that was itself forked from an agent has another way."""
_modules = list[str]()
_own = agent_of(sys.executable, _modules, path=lambda: sys.path)


def own_agent(modules: Sequence[str] = ()) -> Agent:
    """Start the agent of this Python, unless it runs. It imports torch and these modules: those of
    `rank_imports` if ranks will be forked, which triples the time."""
    # torch then counts GPUs through the driver's library. Starting CUDA would make it impossible to fork.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # A rank has two connections to each peer in one group of Gloo, and one in each further group. A few
    # hundred ranks exceed the usual limit of 1,024 open files.
    _, maximum = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (maximum, maximum))
    _modules[:] = [PROBE, *modules]
    _own.start()  # it imports while the driver composes the cells
    return _own


def end_own_agent() -> None:
    """Kill the agent of this Python, if it runs. The next process is forked from a new one."""
    _own.kill()


@contextmanager
def _fixed_addresses() -> Iterator[None]:
    """Context manager: disable address randomization for new processes, before Python 3.12.

    There hash(None), which is part of a device mesh's hash, is the address of None.
    """
    addr_no_randomize, query = 0x0040000, 0xFFFFFFFF
    if sys.version_info >= (3, 12):
        yield
        return
    personality = ctypes.CDLL(None).personality
    before = personality(query)
    personality(before | addr_no_randomize)
    try:
        yield
    finally:
        personality(before)
