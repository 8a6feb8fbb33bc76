"""Start, signal and end the command and all processes below it.

A guardian, forked from dcpbench, is between dcpbench and the command. It adopts orphans, and ends every
process below it as soon as its pipe to dcpbench closes: at the end of a run, and if dcpbench is killed.
"""

import os
import signal
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import BinaryIO

import psutil

from dcpbench.executors import cleanup
from dcpbench.sweep.signals import ENDING_SIGNALS

_POLL_S = 0.02
_LEFT_S = 2.0
"""How long processes that the command leaves have to end: helpers end after it, as a resource tracker."""
_STOP_LIMIT_S, _STOP_ROUND_S = 10.0, 0.2
_TERM_S = 5.0


class Process:
    """The running command. The end of the context ends it, and all that it started.

    Raises:
        OSError: the command cannot be started.
    """

    def __init__(
        self, words: Sequence[str], cwd: Path, environment: Mapping[str, str], output: BinaryIO
    ) -> None:
        self._pipe, other = Pipe()
        self._status: int | None = None
        self._guardian = os.fork()
        if not self._guardian:
            try:
                os.setsid()
                self._pipe.close()
                os.dup2(output.fileno(), 1)  # its caller's pipes end with dcpbench
                os.dup2(output.fileno(), 2)
                _guard(words, cwd, environment, other)
            finally:
                os._exit(0)
        other.close()
        if error := self._result():
            self.end()
            raise OSError(error, os.strerror(error))

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def poll(self) -> int | None:
        """Return the exit status of the command, minus the number of a signal that ended it; None while it
        runs, or a process that it left has time to end."""
        if self._status is None and self._pipe.poll():
            self._status = self._result()
        return self._status

    def descendants(self) -> list[psutil.Process]:
        """Return the command's process and all below it, orphans too."""
        with suppress(psutil.Error):
            return psutil.Process(self._guardian).children(recursive=True)
        return []

    def signal_all(self, number: int) -> bool:
        """Signal all descendants, and return whether all their threads are stopped or have ended."""
        states = set()
        for process in self.descendants():
            with suppress(psutil.Error, OSError):
                process.send_signal(number)
                for stat in Path(f"/proc/{process.pid}/task").glob("*/stat"):
                    states.add(stat.read_text(errors="replace").rpartition(")")[2].split()[0])
        return states <= {*"TtZX"}

    def stop_all(self) -> bool:
        """Stop all descendants with SIGSTOP. Return whether each of their threads has stopped in time."""
        deadline = time.monotonic() + _STOP_LIMIT_S
        while time.monotonic() < deadline:
            round_ends = time.monotonic() + _STOP_ROUND_S
            while time.monotonic() < round_ends:
                # Twice: one can have started another in the meantime.
                if self.signal_all(signal.SIGSTOP) and self.signal_all(signal.SIGSTOP):
                    return True
                time.sleep(0.001)
            # A thread in vfork waits for its child, which is stopped, and cannot stop before it.
            self.continue_all()
            time.sleep(0.005)
        return False

    def continue_all(self) -> None:
        """Continue all descendants with SIGCONT."""
        self.signal_all(signal.SIGCONT)

    def terminate(self, handling: Collection[int]) -> None:
        """Send SIGTERM to all descendants, last to ranks that handle it, by their ids. A scheduler signals
        all at once, and the workers of a loader end while a step is made and saved. Tiny steps can be faster,
        so these ranks are signalled after the end of their workers, or some time later if those ignore it."""
        processes, helpers = self.descendants(), list[psutil.Process]()
        for process in processes:
            with suppress(psutil.Error):
                if process.pid in handling:
                    helpers += process.children(recursive=True)
                else:
                    process.terminate()
        deadline = time.monotonic() + _TERM_S
        while any(map(_is_alive, helpers)) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        for process in processes:
            with suppress(psutil.Error):
                if process.pid in handling:
                    process.terminate()

    def end(self) -> None:
        """End all descendants, stopped ones too, and the guardian."""
        if not self._pipe.closed:
            self._pipe.close()
            os.waitpid(self._guardian, 0)

    def _result(self) -> int:
        """Return the next number from the guardian: an errno or 0, then the exit status."""
        try:
            return int(self._pipe.recv_bytes())
        except (EOFError, OSError):  # it was killed
            return -signal.SIGKILL


def _is_alive(process: psutil.Process) -> bool:
    """Tell whether a process has threads left: its parent is notified when the last one has ended, which can
    be long after the first."""
    with suppress(psutil.Error):
        return bool(process.num_threads() > 1 or process.status() != psutil.STATUS_ZOMBIE)
    return False


def _guard(words: Sequence[str], cwd: Path, environment: Mapping[str, str], pipe: Connection) -> None:
    """Run the command until it has ended or the pipe closes, and end all processes then."""
    for number in ENDING_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # the command inherits what is ignored
            signal.signal(number, lambda *_: None)
    cleanup.adopt_orphans()
    try:
        process = subprocess.Popen(
            words, cwd=cwd, env=environment, stdin=subprocess.DEVNULL, start_new_session=True
        )
    except OSError as error:
        pipe.send_bytes(b"%d" % (error.errno or 1))
        return
    pipe.send_bytes(b"0")
    status, due = None, 0.0
    while not pipe.poll(_POLL_S):
        pid = -1
        while pid:
            try:
                pid, raw = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:  # none is left
                pid = 0
                due = 0.0
            if pid == process.pid:
                status, due = os.waitstatus_to_exitcode(raw), time.monotonic() + _LEFT_S
        if status is not None and time.monotonic() >= due:
            pipe.send_bytes(b"%d" % status)
            status = None
    cleanup.end_orphans()
