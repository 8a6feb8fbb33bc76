"""The file of a process, and the stop that may end it."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from contextlib import suppress
from typing import Any, Callable

from .protection import Protection


class Log:
    """Append events to the file of this process: one JSON object a line, with the number of optimizer steps
    done (`k`) and the time (`t`). Paths are relative to the watched folder."""

    def __init__(self, settings: str) -> None:
        with open(settings) as file:
            known = json.load(file)
        self.folder: str = known["records"]
        self.root: str = known["watched"]
        self.every: int = known["every"]
        self.protection = Protection(known)
        self.stop = Stop(self, known["stop"])
        self.steps = 0
        self._begin()
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        """Begin the file of a process: of this one, and of each that is forked from it."""
        self.stop.changes = 0
        self._file: int | None = None

    @property
    def rank(self) -> int:
        """The rank of this process; 0 if it has none."""
        distributed = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            return int(distributed.get_rank())
        return int(os.environ.get("RANK") or 0)

    @property
    def save_mark(self) -> str:
        """The path of a file that exists if any rank has saved after these steps: one may save for all."""
        return os.path.join(self.folder, f"saved-{self.steps}")

    @property
    def harm_mark(self) -> str:
        """The path of a file that exists if a process was ended before it changed a file of the user."""
        return os.path.join(self.folder, "harm")

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
        try:
            function(*args)
        except Exception as error:  # noqa: BLE001
            self.write("broken", error=repr(error))

    def write(self, event: str, **fields: Any) -> None:
        """Append an event."""
        if self._file is None:
            name = os.path.join(self.folder, f"{os.getpid()}-{time.time_ns()}.jsonl")
            self._file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        line = json.dumps({"e": event, "k": self.steps, "t": time.monotonic(), **fields}, default=repr)
        os.write(self._file, line.encode() + b"\n")


class Stop:
    """The end that dcpbench prepared for the run, as it is typed. To be killed, a process stops, with all its
    threads, where it is: dcpbench then kills all processes."""

    def __init__(self, log: Log, text: str) -> None:
        self._log = log
        self._kind, _, place = text.partition("@")
        self._part, _, number = place.rpartition(":")
        self._number = int(number or 0)
        self.changes = 0
        self._cut = ""

    def before_step(self, number: int) -> None:
        """Make the stop that is due before an optimizer step, counted from 1."""
        signals = {"kill": signal.SIGSTOP, "term": signal.SIGTERM, f"rank{self._log.rank}": signal.SIGKILL}
        if self._cut:
            with suppress(OSError):
                torn = os.path.join(self._log.root, self._cut)
                os.truncate(torn, os.path.getsize(torn) // 2)
            self._end(path=self._cut)
        elif number == self._number and self._kind in signals:
            self._end(signals[self._kind])

    def at_change(self, path: str, to: str = "", opens: bool = False, truncates: bool = False) -> None:
        """Make the stop that is due at a change of a file. A file that is opened is empty then; what else is
        changed is not changed any longer."""
        if to and f"{self._cut}/".startswith(f"{path}/"):
            self._cut = to + self._cut[len(path) :]
        if not self._part or (self._part not in path and self._part not in to):
            return
        self.changes += 1
        if self.changes == self._number and self._kind == "torn":
            self._cut = to or path
        elif self.changes == self._number:
            if opens:
                flags = os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if truncates else 0)
                os.close(os.open(os.path.join(self._log.root, path), flags, 0o666))
            self._end(path=path if opens else "", change=True)

    def _end(self, number: int = signal.SIGSTOP, path: str = "", change: bool = False) -> None:
        """Signal this process, the first time that a launcher starts it."""
        marker = os.path.join(self._log.folder, f"stopped-{self._log.rank}")
        if not os.path.exists(marker):
            self._log.write("stop", path=path, change=change)
            open(marker, "w").close()
            signal.raise_signal(number)  # to this thread, which does not run on
