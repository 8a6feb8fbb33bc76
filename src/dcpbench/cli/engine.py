"""One process that has imported what drivers and ranks need, and is forked for each sweep (`api.engine`).

It reads a request from each line of standard input: the words, the folder and the environment of a sweep. On
standard error the driver writes its pid and what it always writes; then follow a NUL and its exit status.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from importlib import import_module
from itertools import dropwhile
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path
from typing import Any

from dcpbench.executors import fork_server
from dcpbench.rank.nccl import NCCL_PATH

_DRIVER = ("dcpbench.__main__", "dcpbench.cli.by_hydra", "dcpbench.cli.run", "dcpbench.report.show")
_start_program = util.spawnv_passfds


def started(
    words: Sequence[str], environment: Mapping[str, str], stdin: int = subprocess.DEVNULL
) -> "subprocess.Popen[str]":
    """Start `python -m` with these words, in a process group of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", *words],
        stdin=stdin,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        process_group=0,
    )


class Engine:
    """The process, started by a user's. While a sweep runs, it is used as the `subprocess.Popen` of that."""

    def __init__(self) -> None:
        # Plug-ins are imported by each driver: they can be edited between two sweeps.
        environment = {**fork_server.ENVIRONMENT, **os.environ, "DCPBENCH_PLUGINS": ""}
        with fork_server.fixed_addresses():
            self._process = started(["dcpbench.cli.engine"], environment, subprocess.PIPE)

    def end(self) -> None:
        """End it, and wait for that."""
        self._process.communicate()

    def start(self, words: Sequence[str], environment: Mapping[str, str]) -> "Engine":
        """Start a sweep with these words in the current folder."""
        assert self._process.stdin
        assert self._process.stderr
        self._process.stdin.write(f"{json.dumps([words, str(Path.cwd()), dict(environment)])}\n")
        self._process.stdin.flush()
        self.returncode: int | None = None
        self._pid = int(self._process.stderr.readline())
        self.stderr = iter(self._line, "")
        return self

    def _line(self) -> str:
        assert self._process.stderr
        line = self._process.stderr.readline() if self.returncode is None else ""
        text, ended, status = line.partition("\0")
        if ended:
            self.returncode = int(status)
        return text

    def send_signal(self, number: int) -> None:
        """Send a signal to the driver."""
        os.kill(self._pid, number)

    def communicate(self) -> None:
        """Wait for the end of the sweep."""
        for _ in self.stderr:
            pass


def main() -> None:
    """Import everything, and fork a driver for each request until standard input is closed."""
    library = [*dropwhile(lambda place: not place.endswith(".zip"), sys.path)]
    for module in (*_DRIVER, *fork_server.rank_imports(compiles=False)):
        import_module(module)
    for line in sys.stdin:
        if not (pid := os.fork()):
            os.setpgid(0, 0)
            os.write(2, f"{os.getpid()}\n".encode())
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            words, folder, variables = json.loads(line)
            os.chdir(folder)
            drive(words, folder, variables, library)
        _, status = os.waitpid(pid, 0)
        os.write(2, f"\0{os.waitstatus_to_exitcode(status)}\n".encode())


def drive(words: Sequence[str], folder: str, variables: Mapping[str, str], library: Sequence[str]) -> None:
    """Be the driver that a new process in this `folder` would be; `library` is where Python searches after
    PYTHONPATH."""
    os.environ.clear()
    os.environ.update(variables)
    searched = filter(None, variables.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = [folder, *searched, *library]
    program = sys.modules["__main__"] = import_module("dcpbench.__main__")
    sys.argv = [str(program.__file__), *words]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ranks' modules ignore it
    util.spawnv_passfds = forked_server  # type: ignore[assignment]
    program.main()


def forked_server(path: Any, arguments: Sequence[Any], kept: list[int]) -> int:
    """Fork the server of ranks from this process instead of importing everything again, and return its pid.

    Other programs are started; so is the server if a thread could hold a lock in it, and for another NCCL.
    """
    is_server = "forkserver" in os.fsdecode(arguments[-1]) and len(kept) == 2
    if not is_server or threading.active_count() > 1 or NCCL_PATH in os.environ:
        return int(_start_program(path, arguments, kept))
    if pid := os.fork():
        return pid
    try:
        modules = forkserver._forkserver._preload_modules  # type: ignore[attr-defined]
        first = 3
        for file in sorted(kept):
            os.closerange(first, file)
            first = file + 1
        os.closerange(first, os.sysconf("SC_OPEN_MAX"))
        for helper in (forkserver._forkserver, resource_tracker._resource_tracker):
            helper.__init__()  # type: ignore[misc]
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):  # as for a new process
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        listener, alive = kept
        forkserver.main(listener, alive, modules)
    finally:
        os._exit(0)


if __name__ == "__main__":
    main()
