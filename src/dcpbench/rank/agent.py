"""An agent: a process that has imported modules, and forks others for the holder of its connection
(`dcpbench.executors.agent`). It exits when the other end is closed, and what it has forked dies with it."""

import ctypes
import os
import pickle
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from io import BytesIO
from multiprocessing import current_process, resource_tracker, util
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

from dcpbench.rank.messages import Descriptor

_MOST_FILES = 8


def main() -> NoReturn:
    """Be an agent, whose connection is standard input."""
    door = Connection(os.dup(0))
    redirect(0, os.O_RDONLY)
    begin(door)


def begin(door: Connection) -> NoReturn:
    """Be an agent that imports the modules which are received first."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver's to obey
    with suppress(EOFError):
        process = current_process()
        # The driver removes the folder, also if this process is killed.
        process.authkey, process._config["tempdir"], sys.argv, modules = door.recv()  # type: ignore[attr-defined]
        for module in modules:
            with suppress(ImportError):  # whatever needs it reports that
                import_module(module)
        serve(door)
    leave(0)


def serve(door: Connection) -> NoReturn:
    """Fork a process for each request, and report its pid and its exit status, until the door is closed.

    A request is a byte with files: for the reports, the new process's connection, and those it is passed. The
    new process receives a module and the arguments of its `main` there.
    """
    # A helper of multiprocessing, which all that is forked shares. It would print names of memory that killed
    # ranks have left, and that the driver has removed.
    printed = os.dup(2)
    redirect(2, os.O_WRONLY)
    resource_tracker.ensure_running()
    os.dup2(printed, 2)
    os.close(printed)
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    requests = socket.socket(fileno=os.dup(door.fileno()))
    door.close()
    reports: dict[int, Connection] = {}
    while True:
        ready = wait([woken, requests])
        if woken in ready:
            os.read(woken, 4096)
            for pid, status in iter(_ended, None):
                with suppress(OSError, KeyError), reports.pop(pid) as report:
                    report.send(status)
        if requests not in ready:
            continue
        message, files, _, _ = socket.recv_fds(requests, 1, _MOST_FILES)
        if not message:
            leave(0)
        report, link, passed = Connection(files[0]), Connection(files[1]), files[2:]
        server = os.getpid()
        if not (pid := os.fork()):
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            die_with_parent(server)
            requests.close()
            for held in (report, *reports.values()):
                held.close()
            os.close(woken)
            os.close(wakes)
            _be(link, passed)
        link.close()
        for file in passed:
            os.close(file)
        reports[pid] = report
        with suppress(OSError):  # the driver has exited
            report.send(pid)


def _ended() -> tuple[int, int] | None:
    """Return the pid and the exit status of a child that has exited, None if none has."""
    with suppress(ChildProcessError):
        pid, status = os.waitpid(-1, os.WNOHANG)
        return (pid, os.waitstatus_to_exitcode(status)) if pid else None
    return None


def _be(connection: Connection, files: Sequence[int]) -> NoReturn:
    """Call `main` of a module, as requested, and exit."""
    status: Any = 1
    try:
        request = connection.recv_bytes()
    except EOFError:  # the driver has exited
        os._exit(status)
    try:
        module, arguments = _Unpickler(request, files).load()
        import_module(module).main(connection, *arguments)
        status = 0
    except SystemExit as ended:
        status = ended.code or 0
    except BaseException:  # noqa: BLE001 - as Python does with the main module
        traceback.print_exc()
    leave(status if isinstance(status, int) else 1)


def leave(status: int) -> NoReturn:
    """Exit without shutting down the interpreter, during which gloo ranks sometimes abort."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # a full disk; a cell that closed it
            stream.flush()
    # An exiting interpreter calls this, which removes semaphores and folders of multiprocessing.
    util._exit_function()  # type: ignore[attr-defined]
    os._exit(status)


def die_with_parent(parent: int | None) -> None:
    """Let this process be killed when the process that forked it exits; None: no longer."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL if parent else 0)
    if parent not in (None, os.getppid()):
        os._exit(1)


class _Unpickler(pickle.Unpickler):
    def __init__(self, pickled: bytes, files: Sequence[int]) -> None:
        super().__init__(BytesIO(pickled))
        self._files = files

    def persistent_load(self, pid: int) -> Descriptor:
        return Descriptor(self._files[pid])


def pickled(request: tuple[str, tuple[Any, ...]]) -> tuple[bytes, list[int]]:
    """Return what a new process reads, and the files of its descriptors."""
    files = list[int]()

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: object) -> int | None:
            if not isinstance(obj, Descriptor):
                return None
            files.append(obj.number)
            return len(files) - 1

    written = BytesIO()
    Pickler(written).dump(request)
    return written.getvalue(), files


def redirect(number: int, flags: int) -> None:
    """Let a descriptor read or write nothing."""
    nothing = os.open(os.devnull, flags)
    os.dup2(nothing, number)
    os.close(nothing)
