"""The file of a process, and the stop that may end it."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import sys
import threading
import time
import traceback
from typing import Any, Callable

from .protection import Protection, full_path


def replace(module: Any, name: str, function: Any) -> None:
    """Replace a function of a module, and of its package where that passes it on."""
    package, before = sys.modules.get(module.__name__.rpartition(".")[0]), getattr(module, name)
    for place in (module, package):
        if getattr(place, name, None) is before:
            setattr(place, name, function)


class Log:
    """Append events to the file of this process: one JSON object a line, with the number of optimizer steps
    done (`k`), the time (`t`), and the thread, if it is not the one that makes the steps. Paths are relative
    to the watched folder."""

    def __init__(self, settings: str) -> None:
        with open(settings) as file:
            known = json.load(file)
        self.folder: str = known["records"]
        self.root: str = known["watched"]
        self.every, self.deterministic, self.ends, self.saves = (
            int(known.get(name, 0)) for name in ("every", "deterministic", "ends", "saves")
        )
        self.protection = Protection(known)
        self.stop = Stop(self, known["stops"])
        self.steps = 0
        self.is_in_backward = False
        self.follows_stop = any(name.startswith("stopped-") for name in os.listdir(self.folder))
        """Whether a launcher started this process after a rank was stopped: to resume."""
        if "RANK" in os.environ:
            self.mark_restart()
        self._begin()
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        """Begin the file of a process: of this one, and of each that is forked from it."""
        self.stop.forget_changes()
        self.trains_in: int | None = None
        """The thread that makes optimizer steps."""
        self._file: int | None = None

    def mark_restart(self) -> None:
        """Give the run time if this process resumes it."""
        if self.follows_stop:
            self.mark("restarted")

    @property
    def place(self) -> tuple[int, int]:
        """The rank of this process, 0 if it has none, and the number of ranks."""
        distributed = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            return int(distributed.get_rank()), int(distributed.get_world_size())
        return int(os.environ.get("RANK") or 0), 1

    def path(self, name: str) -> str:
        """Return the path of a file in the folder of the records, which all processes and dcpbench see."""
        return os.path.join(self.folder, name)

    def mark(self, name: str) -> None:
        """Make an empty file there: `saved-4` if a rank saved after step 4, since one may save for all;
        `harm` if a process was ended before it changed a file of the user; `enough` where the run is to end;
        `restarted` if this process resumes it."""
        open(self.path(name), "w").close()

    def watched(self, path: Any, names_link: bool = False) -> str | None:
        """Return the path of a file below the watched folder; None of others, and of what is not a path. A
        link is followed, unless the call is about the link itself."""
        full = full_path(path)
        if full is None or not full.startswith(self.root + os.sep) or "__pycache__" in full:
            return None
        if not names_link:
            full = os.path.realpath(full)
        return full[len(self.root) + 1 :] if full.startswith(self.root + os.sep) else None

    def guarded(self, function: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Call a function of the recorder. If it fails the script continues, and the log has the error."""
        try:
            function(*args, **kwargs)
        except Exception as error:  # noqa: BLE001
            frame = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{os.path.basename(frame.filename)}:{frame.lineno}"
            self.write("broken", error=f"{error!r} ({place})")

    def wrapped(
        self,
        function: Callable[..., Any],
        before: Callable[..., None] | None = None,
        after: Callable[..., None] | None = None,
        unless: Callable[[], bool] = bool,
    ) -> Callable[..., Any]:
        """Return a function of the script's that calls those of the recorder too, with its arguments."""

        @functools.wraps(function)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            if before and not unless():
                self.guarded(before, *args, **kwargs)
            result = function(*args, **kwargs)
            if after and not unless():
                self.guarded(after, *args, **kwargs)
            return result

        return recorded

    def write(self, event: str, **fields: Any) -> None:
        """Append an event."""
        if self._file is None:
            name = self.path(f"{os.getpid()}-{time.time_ns()}.jsonl")
            self._file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        thread = threading.get_ident()
        known = {"e": event, "k": self.steps, "t": time.monotonic()}
        if thread != self.trains_in:
            known["thread"] = thread
        line = json.dumps({**known, **fields}, default=repr)
        os.write(self._file, line.encode() + b"\n")


class Stop:
    """The places at which dcpbench stops the run, as they are typed.

    At `kill@`, `write@` and `torn@` the process that is there first waits. dcpbench then stops all, copies
    the folder, and lets them continue or ends the run. What a cut leaves of a file is made in the copy. At
    `term@` all processes get the signal, at `rank1@` the rank.
    """

    def __init__(self, log: Log, texts: list[str]) -> None:
        self._log = log
        self._places: list[dict[str, Any]] = []
        for text in texts:
            kind, _, place = text.partition("@")
            part, _, number = place.rpartition(":")
            self._places.append({"kind": kind, "part": part, "number": int(number), "seen": 0, "torn": ""})

    def forget_changes(self) -> None:
        """Count changes of files from zero, in a process that was just forked."""
        for place in self._places:
            place["seen"] = 0

    def before_step(self, number: int) -> None:
        """Make the stops that are due before an optimizer step, counted from 1."""
        signals = {"term": signal.SIGTERM, f"rank{self._log.place[0]}": signal.SIGKILL}
        for index, place in enumerate(self._places):
            if place["torn"]:
                self._freeze(index, path=place["torn"], cut="half")
                place["torn"] = ""
            elif number == place["number"] and place["kind"] == "kill":
                self._freeze(index)
            elif number == place["number"] and place["kind"] in signals:
                self._signal(signals[place["kind"]])
        if number and self._is_enough(number):
            self._log.write("enough")
            self._log.mark("enough")
            while True:  # until dcpbench ends the run
                time.sleep(1)

    def _is_enough(self, number: int) -> bool:
        """Tell whether the run ends before a step: a given one, or the one some steps after a given number of
        saves and after all stops."""
        if self._log.ends or not self._log.saves:
            return 0 < self._log.ends <= number
        names = [name[6:] for name in os.listdir(self._log.folder) if name.startswith("saved-")]
        dates = sorted({0, *map(int, names)})[: self._log.saves + 1]
        steps: list[int] = [place["number"] for place in self._places if not place["part"]]
        if len(dates) <= self._log.saves:
            return False
        gap = dates[-1] - dates[-2]
        least = dates[-1] + min(gap // 2 + 2, max(1, gap - 1))  # not after the next save
        return number > max([least, *(step + 1 for step in steps)])

    def at_change(self, path: str, to: str = "", opens: bool = False, truncates: bool = False) -> None:
        """Make the stops that are due at a change of a file. In the copy, a file that is opened is empty."""
        for index, place in enumerate(self._places):
            if to and f"{place['torn']}/".startswith(f"{path}/"):
                place["torn"] = to + place["torn"][len(path) :]
            if not place["part"] or (place["part"] not in path and place["part"] not in to):
                continue
            place["seen"] += 1
            if place["seen"] == place["number"] and place["kind"] == "torn":
                place["torn"] = to or path
            elif place["seen"] == place["number"]:
                cut = "empty" if truncates else "made" if opens else ""
                self._freeze(index, path=path if opens else "", cut=cut)

    def _freeze(self, index: int, path: str = "", cut: str = "") -> None:
        """Wait until dcpbench has seen to a stop, at which another process can have been first."""
        own, due, done = (self._log.path(f"{word}-{index}") for word in (os.getpid(), "due", "done"))
        with open(own, "w") as file:
            json.dump({"k": self._log.steps, "t": time.monotonic(), "path": path, "cut": cut}, file)
        with contextlib.suppress(FileExistsError):
            os.link(own, due)
        while not os.path.exists(done):
            time.sleep(0.002)

    def _signal(self, number: int) -> None:
        """Take a signal, the first time that a launcher starts this process. SIGTERM is sent by dcpbench to
        all processes, as launchers and schedulers do, as soon as all ranks are here."""
        rank, count = self._log.place
        marker = self._log.path(f"stopped-{rank}")
        if self._log.follows_stop or os.path.exists(marker):
            return
        handles = number == signal.SIGTERM and signal.getsignal(number) != signal.SIG_DFL
        self._log.write("stop", path="", cut="")
        with open(f"{marker}.tmp", "w") as file:
            json.dump([count, os.getpid(), handles], file)
        os.rename(file.name, marker)
        if number == signal.SIGKILL:
            signal.raise_signal(number)  # to this thread, which does not run on
        if handles:
            hook = sys.excepthook

            def failed(kind: Any, error: BaseException, trace: Any) -> None:
                if isinstance(error, Exception):
                    self._log.guarded(lambda: self._log.write("failed", error=repr(error)))
                hook(kind, error, trace)

            sys.excepthook = failed
        while not os.path.exists(self._log.path("signalled")):
            time.sleep(0.002)
