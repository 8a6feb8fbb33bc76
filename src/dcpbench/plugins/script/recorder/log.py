"""The file of a process, and the stop that may end it."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from typing import Any, Callable

VARIABLE = "DCPBENCH_SCRIPT"


class Log:
    """Append events to the file of this process: one JSON object a line, with the number of optimizer steps
    done (`k`) and the time (`t`). Paths are relative to the watched folder.

    `quiet` is set in a thread while the recorder itself reads tensors or files. While `makes_up`, optimizer
    steps are not the script's.
    """

    def __init__(self, settings: str) -> None:
        with open(settings) as file:
            known = json.load(file)
        self.settings = settings
        self.folder: str = known["records"]
        self.root: str = known["watched"]
        self.every: int = known["every"]
        self.stop = Stop(self, **known["stop"])
        self.steps = 0
        self.quiet = threading.local()
        self.has_saved = False
        self.makes_up = False
        self._is_broken = False
        self._file = -1
        self._pid = 0

    def forked(self) -> None:
        """Begin again in a forked process: a rank, or a loader's worker."""
        self.steps = 0
        self.stop.changes = 0

    @property
    def rank(self) -> int:
        """The rank of this process; 0 if it has none."""
        distributed = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            return int(distributed.get_rank())
        return int(os.environ.get("RANK") or 0)

    def watched(self, path: Any) -> str | None:
        """Return the path of a file below the watched folder; None of others, and of what is no path."""
        try:
            full = os.path.abspath(os.fsdecode(path))
        except (TypeError, ValueError):
            return None
        is_watched = full.startswith(self.root + os.sep) and "__pycache__" not in full
        return full[len(self.root) + 1 :] if is_watched else None

    def guarded(self, function: Callable[..., None], *args: Any) -> None:
        """Call a function of the recorder. If it fails the script continues, and the log has the error."""
        was_quiet = getattr(self.quiet, "on", False)
        self.quiet.on = True
        try:
            function(*args)
        except Exception as error:  # noqa: BLE001
            if not self._is_broken:
                self._is_broken = True
                self.write("broken", error=repr(error))
        finally:
            self.quiet.on = was_quiet

    def write(self, event: str, **fields: Any) -> None:
        """Append an event."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            name = os.path.join(self.folder, f"{self._pid}-{time.time_ns()}.jsonl")
            self._file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        line = json.dumps({"e": event, "k": self.steps, "t": time.time(), **fields}, default=repr)
        os.write(self._file, line.encode() + b"\n")


class Stop:
    """The end that dcpbench prepared for the run: `kind`, and at which step, or at which change of a file
    whose path has `part` in it."""

    def __init__(self, log: Log, kind: str = "", rank: int = 0, number: int = 0, part: str = "") -> None:
        self._log, self._kind, self._rank, self._number, self._part = log, kind, rank, number, part
        self.changes = 0
        self._torn = ""

    def before_step(self, number: int) -> None:
        """End this process, or all, before an optimizer step, counted from 1."""
        if self._torn:
            torn = os.path.join(self._log.root, self._torn)
            os.truncate(torn, os.path.getsize(torn) // 2)
            self._kill_all("cut to half", self._torn)
        if number != self._number or self._part:
            return
        if self._kind == "kill":
            self._kill_all(f"before step {number}")
        elif self._kind == "term" and self._first(f"term-{self._log.rank}"):
            self._end(signal.SIGTERM, f"before step {number}")
        elif self._kind == "rank" and self._log.rank == self._rank and self._first("rank"):
            self._end(signal.SIGKILL, f"before step {number}")

    def at_change(self, path: str, to: str = "", opens: bool = False, truncates: bool = False) -> None:
        """End all processes at a change of a file. A file that is opened is empty then; what else is changed
        is not changed any longer."""
        if not self._part or (self._part not in path and self._part not in to):
            return
        self.changes += 1
        if self.changes != self._number:
            return
        if self._kind == "torn":
            self._torn = to or path
        elif opens:
            flags = os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if truncates else 0)
            os.close(os.open(os.path.join(self._log.root, path), flags, 0o666))
            self._kill_all(f"at a change of {path}", path)
        else:
            self._kill_all(f"at a change of {to or path}")

    def renamed(self, path: str, to: str) -> None:
        """Follow the file that is going to be cut."""
        if self._torn == path or self._torn.startswith(path + os.sep):
            self._torn = to + self._torn[len(path) :]

    def _first(self, name: str) -> bool:
        """Tell whether it did not happen before: a launcher can start ranks again."""
        try:
            os.close(os.open(os.path.join(self._log.folder, name), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def _end(self, number: int, why: str) -> None:
        self._log.write("stop", at=why)
        os.kill(os.getpid(), number)

    def _kill_all(self, why: str, path: str = "") -> None:
        if not self._first("all"):
            time.sleep(60)  # another process kills this one
        self._log.write("stop", at=why, path=path)
        word = f"{VARIABLE}={self._log.settings}".encode()
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{name}/environ", "rb") as file:
                    if int(name) != os.getpid() and word in file.read().split(b"\0"):
                        os.kill(int(name), signal.SIGKILL)
            except OSError:  # it has exited, or belongs to another user
                continue
        os.kill(os.getpid(), signal.SIGKILL)
