"""Run the command: to its end, frozen at stops on the way, or to a stop that ends it."""

import json
import os
import shutil
import signal
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from dcpbench import SAFE_PATH
from dcpbench.config.errors import ConfigError
from dcpbench.plugins.script.copies import Copy, open_for_writing, size_of
from dcpbench.plugins.script.process import Process
from dcpbench.plugins.script.record import Run
from dcpbench.plugins.script.stops import GENTLE
from dcpbench.plugins.script.words import paths_of, resume_words
from dcpbench.plugins.script.working_folder import WorkingFolder
from dcpbench.records.store import write_json

OUT = "{out}"
OFFLINE = {"WANDB_MODE": "offline", "NEPTUNE_MODE": "offline", "CLEARML_OFFLINE_MODE": "1"}
"""Variables that keep these runs out of the loggers of a team, set where the user has not set them."""
RECORDER = Path(__file__).parent / "recorder"
"""The folder that starts the recorder, first in PYTHONPATH."""
_POLL_S = 0.005
_APART_S = 5.0
"""How long the first rank waits for the others at a stop before a step."""
_LONGEST_COPY_S = 10.0
_BYTES_PER_S = 300e6
"""Assumed speed of the first copy."""


@dataclass
class Freezer:
    """Copies of a run at its stops: all its processes are stopped, its folder is copied, and they
    continue. `copies` has the copies by their stops. A stop whose copy would take too long has none, and none
    has one after the run failed, perhaps before it reached them all."""

    stops: Sequence[str]
    folders: Mapping[str, Path]
    copies: dict[str, Copy] = field(default_factory=dict)
    frozen_s: float = 0.0
    has_failed: bool = False
    _speed: float = _BYTES_PER_S

    def fail(self) -> None:
        """Drop all copies: the run failed, perhaps since it was frozen."""
        self.copies, self.has_failed = {}, True

    def freeze(self, process: Process, out: Path, records: Path, due: Collection[int]) -> None:
        """Copy the folder for the stops that are due, and continue the run."""
        began = time.monotonic()
        is_stopped = process.stop_all()
        at, size = time.monotonic(), size_of(out)
        for index in _marked(records, "due", len(self.stops)):
            stop = self.stops[index]
            if stop not in self.copies and is_stopped and size / self._speed < _LONGEST_COPY_S:
                event = json.loads((records / f"due-{index}").read_text())
                writing = open_for_writing(process.descendants(), out)
                begins = time.monotonic()
                self.copies[stop] = Copy.taken(out, self.folders[stop], at, event, writing)
                seconds = time.monotonic() - begins
                if size > 1e8:
                    self._speed = size / seconds
            (records / f"done-{index}").touch()
        waiting = _marked(records, "done", len(self.stops))
        while process.poll() is None and _marked(records, "on", len(self.stops)) != waiting:
            process.continue_all()  # again: one can stop itself after it was continued
            time.sleep(0.001)
        self.frozen_s += time.monotonic() - began


def _marked(records: Path, word: str, count: int) -> list[int]:
    return [index for index in range(count) if (records / f"{word}-{index}").exists()]


@dataclass(frozen=True)
class Command:
    """The script's command: its words, the folder in which it was typed, where its results go, and how it is
    recorded. Every run uses the folder `out`: links, pointers and saved arguments can have its path."""

    words: Sequence[str]
    cwd: Path
    place: Path
    every: int = 1
    grace_s: float = 30.0
    deterministic: bool = False
    is_recorded: bool = True
    saves: int = 0
    began: float = field(default_factory=time.time)
    """Seconds of the epoch: files of the user that were there before are protected."""

    @property
    def has_out(self) -> bool:
        """Whether it names the folder of its output."""
        return any(OUT in word for word in self.words)

    @property
    def out(self) -> Path:
        """The folder of the output of each run: empty at first, or a copy of the working folder."""
        return self.place / "run" / "out"

    @property
    def working(self) -> WorkingFolder:
        """The working folder. Each run of a command without `{out}` gets a copy."""
        return WorkingFolder(self.cwd, self.place)

    def run(
        self,
        folder: Path,
        name: str,
        limit_s: float,
        stops: Sequence[str] = (),
        freezer: Freezer | None = None,
        source: Copy | None = None,
        more: Sequence[str] = (),
        ends: int = 0,
    ) -> Run:
        """Run the command for at most `limit_s` seconds, frozen by a `freezer` at its stops, or else ended by
        the first stop.

        Args:
            folder: where its log and its records go.
            name: what the run is for, in the names of files.
            source: the folder with which it begins.
            more: words that a resume adds.
            ends: the step before which the run ends; 0: its own end, or that after `saves`.
        """
        records, log = folder / f"{name}-records", folder / f"{name}.log"
        shutil.rmtree(records, ignore_errors=True)  # of an earlier resume
        records.mkdir(parents=True)
        shutil.rmtree(self.out, ignore_errors=True)
        if source:
            source.put(self.out)
        elif self.has_out:
            self.out.mkdir(parents=True)
        else:
            self.working.copy(self.out)
        settings = folder / f"{name}.json"
        # A resumed run is recorded at each step: it is compared where the uninterrupted one is recorded.
        known: dict[str, Any] = {
            "records": str(records),
            "watched": str(self.out),
            "every": 1 if source else self.every,
        }
        named = [str(self.cwd), *paths_of([*self.words, *more], self.cwd)]
        known |= {"deterministic": self.deterministic, "saves": self.saves, "ends": ends}
        known |= {"began": self.began, "own": [str(self.place)], "named": named, "stops": [*stops]}
        write_json(settings, known)
        added = resume_words(more, source, self.out) if source else more
        words = [word.replace(OUT, str(self.out)) for word in (*self.words, *added)]
        words = words if self.has_out else self.working.words(words, self.out)
        with log.open("wb") as output:
            status = self._status(words, output, settings, time.monotonic() + limit_s, stops, freezer)
        write_json(settings, known | {"status": status})
        return self.recorded(folder, name)

    def recorded(self, folder: Path, name: str) -> Run:
        """Return a run that was made, as `run` did."""
        status = json.loads((folder / f"{name}.json").read_text())["status"]
        return Run.read(folder / f"{name}-records", folder / f"{name}.log", status)

    def _status(
        self,
        words: Sequence[str],
        output: BinaryIO,
        settings: Path,
        deadline: float,
        stops: Sequence[str],
        freezer: Freezer | None,
    ) -> int | None:
        """Return the exit status; None where it took too long."""
        path = os.pathsep.join(filter(None, [str(RECORDER), os.environ.get("PYTHONPATH")]))
        environment = OFFLINE | os.environ
        if self.deterministic:
            environment = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} | environment
        if self.is_recorded:
            environment |= {"PYTHONPATH": path, "DCPBENCH_SCRIPT": str(settings)}
        if SAFE_PATH in environment.items():  # of dcpbench alone: a script imports its neighbours
            del environment[SAFE_PATH[0]]
        cwd = self.cwd if self.has_out else self.out
        try:
            with Process(words, cwd, environment, output) as process:
                return self._wait(process, settings, deadline, stops, freezer)
        except OSError as error:
            raise ConfigError(f"{words[0]}: cannot be started: {error.strerror}") from None

    def _wait(
        self, process: Process, settings: Path, deadline: float, stops: Sequence[str], freezer: Freezer | None
    ) -> int | None:
        """Wait until the command ends, or a stop or the deadline ends it."""
        records = settings.parent / f"{settings.stem}-records"
        is_stopped, longest = False, deadline
        while (status := process.poll()) is None:
            if (records / "harm").exists():
                return -signal.SIGKILL
            if (records / "enough").exists():
                return 0
            done = _marked(records, "done", len(stops))
            due = [index for index in _marked(records, "due", len(stops)) if index not in done]
            if due and freezer:
                began = time.monotonic()
                freezer.freeze(process, self.out, records, due)
                deadline += time.monotonic() - began
            elif due:
                process.stop_all()
                writing = open_for_writing(process.descendants(), self.out)
                write_json(settings.with_name(f"{settings.stem}-writing.json"), writing)
                return -signal.SIGKILL
            if at_stop := [path for path in records.glob("stopped-*") if not path.suffix]:
                if not is_stopped:
                    is_stopped, began = True, time.monotonic()
                    deadline = began + self.grace_s
                # The number of ranks, the process of one, and whether it handles SIGTERM.
                known = [json.loads(path.read_text()) for path in at_stop]
                is_apart = len(known) < known[0][0] and time.monotonic() < began + _APART_S
                if not is_apart and not (records / "signalled").exists():
                    if stops[0].startswith("term"):
                        process.terminate({pid: handles for _, pid, handles in known})
                    (records / "signalled").touch()
                if (records / "restarted").exists():  # by its launcher, which resumes it
                    deadline = longest
            if time.monotonic() > deadline:
                return -signal.SIGKILL if is_stopped else None
            time.sleep(_POLL_S)
        return status

    def stop(self, folder: Path, stop: str, limit_s: float, ends: int = 0) -> tuple[Run, Copy | None]:
        """Run the command to a stop that ends it, and return the folder that it left; None if the run ended
        before."""
        run = self.run(folder, "stopped", limit_s, [stop], ends=ends)
        due, writing = folder / "stopped-records" / "due-0", folder / "stopped-writing.json"
        events = run.of_kind("stop")
        if due.exists() and not stop.startswith(GENTLE):
            events = [json.loads(due.read_text())]
        if not events:
            return run, None
        paths = json.loads(writing.read_text()) if writing.exists() else {}
        return run, Copy.moved(self.out, folder / "out", float("inf"), events[0], paths)
