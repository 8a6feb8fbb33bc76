"""Run the command: to its end, frozen at stops on the way, or to a stop that ends it."""

import json
import os
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from dcpbench import SAFE_PATH
from dcpbench.config.errors import ConfigError
from dcpbench.plugins.script.copies import Copy, open_for_writing
from dcpbench.plugins.script.process import Process
from dcpbench.plugins.script.record import RecordedRun
from dcpbench.plugins.script.words import paths_of, resume_words
from dcpbench.plugins.script.working_folder import WorkingFolder
from dcpbench.records import files
from dcpbench.records.store import write_json

OUT = "{out}"
OFFLINE = {"WANDB_MODE": "offline", "NEPTUNE_MODE": "offline", "CLEARML_OFFLINE_MODE": "1"}
"""Variables that keep these runs out of the loggers of a team, set where the user has not set them."""
RECORDER = Path(__file__).parent / "recorder"
"""The folder that starts the recorder, first in PYTHONPATH."""
_POLL_S = 0.005
_APART_S = 5.0
"""How long the first rank waits for the others at a stop before a step."""
_LARGEST_COPY = 3e9
"""Bytes that many disks copy in ten seconds."""


@dataclass
class Freezer:
    """Copies of a run at its stops: all its processes are stopped, its folder is copied, and they continue,
    or are ended at the only stop. A stop that is reached has a copy in `copies`; None if the folder is large,
    since other hosts, and collectives with a timeout, do not wait."""

    folders: Mapping[str, Path]
    ends: bool = False
    copies: dict[str, Copy | None] = field(default_factory=dict)
    frozen_s: float = 0.0

    def freeze(self, process: Process, out: Path, records: Path) -> float:
        """Copy the folder for the stops that are due, and return for how many seconds the run was stopped."""
        due = [(records / f"due-{index}", stop) for index, stop in enumerate(self.folders)]
        due = [(path, stop) for path, stop in due if stop not in self.copies and path.exists()]
        if not due:
            return 0.0
        began = time.monotonic()
        is_stopped = process.stop_all()
        at, size = time.monotonic(), sum(files.file_lengths(out).values())
        for path, stop in due:
            self.copies[stop] = None
            if self.ends or (is_stopped and size < _LARGEST_COPY):
                writing = open_for_writing(process.descendants(), out)
                event = json.loads(path.read_text())
                self.copies[stop] = Copy.taken(out, self.folders[stop], at, event, writing)
            if not self.ends:
                path.with_name(path.name.replace("due", "done")).touch()
        if not self.ends:
            process.continue_all()
        seconds = time.monotonic() - began
        self.frozen_s += seconds
        return seconds


@dataclass(frozen=True)
class ScriptCommand:
    """The script's command: its words, the folder in which it was typed, where its results go, and how it is
    recorded. Every run uses the folder `out`: links, pointers and saved arguments can have its path."""

    words: Sequence[str]
    cwd: Path
    place: Path
    resume_args: Sequence[str] = ()
    every: int = 1
    grace: float = 30.0
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
        freezer: Freezer | None = None,
        source: Copy | None = None,
        ends: int = 0,
    ) -> RecordedRun:
        """Run the command for at most `limit_s` seconds, with the stops of a `freezer`.

        Args:
            folder: where its log and its records go.
            name: what the run is for, in the names of files.
            source: the folder that it resumes.
            ends: the step before which the run ends; 0: its own end, or that after `saves`.

        Raises:
            ConfigError: the command cannot be started.
        """
        records, log = folder / f"{name}-records", folder / f"{name}.log"
        for old in (records, self.out):  # of an earlier resume
            shutil.rmtree(old, ignore_errors=True)
        records.mkdir(parents=True)
        if source:
            source.put(self.out)
        elif self.has_out:
            self.out.mkdir(parents=True)
        else:
            self.working.copy(self.out)
        settings = folder / f"{name}.json"
        known: dict[str, Any] = {
            "records": str(records),
            "watched": str(self.out),
            # A resumed run is recorded at each step: it is compared where the uninterrupted one is recorded.
            "every": 1 if source else self.every,
            "deterministic": self.deterministic,
            "saves": self.saves,
            "ends": ends,
            "began": self.began,
            "own": [str(self.place)],
            "named": [str(self.cwd), *paths_of([*self.words, *self.resume_args], self.cwd)],
            "stops": [*freezer.folders] if freezer else [],
        }
        write_json(settings, known)
        added = resume_words(self.resume_args, source, self.out) if source else []
        words = [word.replace(OUT, str(self.out)) for word in (*self.words, *added)]
        words = words if self.has_out else self.working.words(words, self.out)
        with log.open("wb") as output, self._started(words, settings, output) as process:
            status = self._wait(process, records, time.monotonic() + limit_s, freezer)
        write_json(settings, known | {"status": status})
        return self.recorded(folder, name)

    def recorded(self, folder: Path, name: str) -> RecordedRun:
        """Return a run that was made, as `run` did."""
        status = json.loads((folder / f"{name}.json").read_text())["status"]
        return RecordedRun.read(folder / f"{name}-records", folder / f"{name}.log", status)

    def _started(self, words: Sequence[str], settings: Path, output: BinaryIO) -> Process:
        """Start the command, recorded as the file `settings` says."""
        environment = OFFLINE | os.environ
        if self.deterministic:
            environment = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} | environment
        if self.is_recorded:
            path = os.pathsep.join(filter(None, [str(RECORDER), os.environ.get("PYTHONPATH")]))
            environment |= {"PYTHONPATH": path, "DCPBENCH_SCRIPT": str(settings)}
        if SAFE_PATH in environment.items():  # of dcpbench alone: a script imports its neighbours
            del environment[SAFE_PATH[0]]
        try:
            return Process(words, self.cwd if self.has_out else self.out, environment, output)
        except OSError as error:
            meant = f"; for a Python file, write python {words[0]}" if words[0].endswith(".py") else ""
            raise ConfigError(f"{words[0]}: cannot be started: {error.strerror}{meant}") from None

    def _wait(self, process: Process, records: Path, deadline: float, freezer: Freezer | None) -> int | None:
        """Wait until the command ends, or a stop ends it, and return its exit status; None if it takes too
        long."""
        signalled, longest, began = records / "signalled", deadline, 0.0
        while (status := process.poll()) is None:
            if (records / "harm").exists():
                return -signal.SIGKILL
            if (records / "enough").exists():
                return 0
            if freezer and (seconds := freezer.freeze(process, self.out, records)):
                if freezer.ends:
                    return -signal.SIGKILL
                deadline += seconds
            if freezer and (at_stop := [path for path in records.glob("stopped-*") if not path.suffix]):
                if not began:
                    began = time.monotonic()
                    deadline = began + self.grace
                # The number of ranks, the process of one, and whether it handles SIGTERM.
                known = [json.loads(path.read_text()) for path in at_stop]
                is_apart = len(known) < known[0][0] and time.monotonic() < began + _APART_S
                if not is_apart and not signalled.exists():
                    if "term" in next(iter(freezer.folders)):
                        process.terminate([pid for _, pid, handles in known if handles])
                    signalled.touch()
                if (records / "restarted").exists():  # by its launcher, which resumes it
                    deadline = longest
            if time.monotonic() > deadline:
                return -signal.SIGKILL if began else None
            time.sleep(_POLL_S)
        return status

    def stop(self, folder: Path, stop: str, limit_s: float, ends: int = 0) -> tuple[RecordedRun, Copy | None]:
        """Run the command to a stop that ends it, and return the folder that it left; None if the run ended
        before."""
        freezer = Freezer({stop: folder / "out"}, ends=True)
        run = self.run(folder, "stopped", limit_s, freezer, ends=ends)
        if events := run.of_kind("stop"):  # at which it had time to end
            return run, Copy.taken(self.out, folder / "out", float("inf"), events[0], {})
        return run, freezer.copies.get(stop)
