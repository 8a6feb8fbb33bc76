"""Drivers in processes of their own: a new Python each, or forked from an agent that has imported what they
and their ranks need (`api.engine`)."""

import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from importlib import import_module
from multiprocessing import Pipe, resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

from dcpbench.executors import agent as agents
from dcpbench.executors.agent import ENVIRONMENT, Agent, Forked, agent_of
from dcpbench.executors.machine import rank_imports
from dcpbench.rank import agent as forked_agent
from dcpbench.rank.messages import Descriptor
from dcpbench.rank.nccl import NCCL_PATH
from dcpbench.sweep.signals import ENDING_SIGNALS

_IMPORTED = ("dcpbench.__main__", "dcpbench.cli.by_hydra", "dcpbench.cli.run", "dcpbench.report.show")
_OWN = ("dcpbench", "torch")


def kept_agent() -> Agent:
    """Return an agent that has imported everything but plug-ins and a user's code, which each driver imports:
    they can be edited between two sweeps."""
    of_dcpbench = (name for name in rank_imports(compiles=False) if name.partition(".")[0] in _OWN)
    kept = agent_of(sys.executable, [*_IMPORTED, *of_dcpbench], lambda: ENVIRONMENT | os.environ)
    kept.start()
    return kept


class Driver:
    """A driver with these words, in the current folder and in a process group of its own. `stderr` has its
    lines."""

    def __init__(self, words: Sequence[str], environment: Mapping[str, str], kept: Agent | None) -> None:
        reads, writes = os.pipe()
        self.stderr = os.fdopen(reads)
        self._process: subprocess.Popen[bytes] | Forked
        try:
            if kept:
                asked = words, str(Path.cwd()), dict(environment), Descriptor(writes)
                _, self._process = kept.fork(__name__, *asked)
            else:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "dcpbench", *words],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=writes,
                    env=environment,
                    process_group=0,
                )
        finally:
            os.close(writes)

    def interrupt(self) -> None:
        """Do as Ctrl-C does."""
        os.kill(self._process.pid, signal.SIGINT)

    def wait(self) -> int:
        """Wait for its end, and return its exit status."""
        with self.stderr:
            for _ in self.stderr:
                pass
        self._process.wait()
        status = self._process.exitcode if isinstance(self._process, Forked) else self._process.returncode
        assert status is not None
        return status


def main(
    _: Connection, words: Sequence[str], folder: str, variables: Mapping[str, str], stderr: Descriptor
) -> None:
    """Be a driver, in a process forked from the kept agent."""
    forked_agent.die_with_parent(None)
    os.setpgid(0, 0)
    forked_agent.redirect(1, os.O_WRONLY)
    os.dup2(stderr.number, 2)
    os.close(stderr.number)
    os.chdir(folder)
    drive(words, folder, variables)


def drive(words: Sequence[str], folder: str, variables: Mapping[str, str]) -> None:
    """Be the driver that a new process in this `folder` would be, whose agent is forked from this process."""
    places = {os.path.abspath(place) for place in os.environ.get("PYTHONPATH", "").split(os.pathsep)}  # noqa: PTH100
    searched = filter(None, variables.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = [folder, *searched, *(place for place in sys.path if place and place not in places)]
    os.environ.clear()
    os.environ.update(variables)
    program = sys.modules["__main__"] = import_module("dcpbench.__main__")
    sys.argv = [str(program.__file__), *words]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which agents ignore
    agents.spawn = forked
    program.main()


def forked(
    python: str, door: Connection, environment: Mapping[str, str], path: Sequence[str]
) -> subprocess.Popen[bytes] | Forked:
    """Fork the agent of ranks from this process instead of importing everything again. That of another
    interpreter is started; so is this one if a thread could hold a lock in it, and for another NCCL."""
    if environment is not os.environ or threading.active_count() > 1 or NCCL_PATH in os.environ:
        return agents.spawned(python, door, environment, path)
    exited, held = Pipe(duplex=False)
    if not (pid := os.fork()):
        _serve(door, held)
    held.close()
    return Forked(pid, exited)


def _serve(door: Connection, held: Connection) -> NoReturn:
    """Be an agent, with no file of the driver but its connections and that of multiprocessing's helper."""
    try:
        os.setsid()
        first = 3
        for file in sorted([door.fileno(), held.fileno(), resource_tracker.getfd() or 0]):
            os.closerange(first, file)
            first = file + 1
        os.closerange(first, os.sysconf("SC_OPEN_MAX"))
        os.register_at_fork(after_in_child=held.close)  # or ranks and what they start would hold it
        for number in ENDING_SIGNALS:  # as in a new process
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        forked_agent.begin(door)
    except BaseException:  # noqa: BLE001 - as Python does with the main module
        traceback.print_exc()
    finally:
        os._exit(1)
