"""Choose where the command is stopped, start it, stop it, and end all processes that it started."""

import os
import re
import signal
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import BinaryIO

from dcpbench import SAFE_PATH
from dcpbench.config.errors import ConfigError
from dcpbench.plugins.script.process import Process
from dcpbench.plugins.script.record import Run
from dcpbench.plugins.script.words import paths_of
from dcpbench.plugins.script.working_folder import WorkingFolder
from dcpbench.records.files import file_lengths
from dcpbench.records.store import write_json

OUT = "{out}"
OFFLINE = {"WANDB_MODE": "offline", "NEPTUNE_MODE": "offline", "CLEARML_OFFLINE_MODE": "1"}
"""Variables that keep these runs out of the loggers of a team, set where the user has not set them."""
RECORDER = Path(__file__).parent / "recorder"
"""The folder that starts the recorder, first in PYTHONPATH."""
_POLL_S = 0.02
_GENTLE = ("term", "rank")
"""Kinds of stops after which the command has some time to end, as a scheduler allows."""
_STOP = re.compile(r"((kill|term|rank\d{1,6})@|(write|torn)@.+:)[1-9]\d{0,8}", re.ASCII)


def checked_stop(text: str) -> str:
    """Return a stop as it is typed, or raise a ConfigError."""
    if not _STOP.fullmatch(text):
        raise ConfigError(
            f"--stop {text}: expected kill@STEP, term@STEP, rank1@STEP, write@PART:N, torn@PART:N"
        )
    return text


def chosen(reference: Run) -> list[str]:
    """Return one stop of each kind that applies: in the middle between two saves, and in a save."""
    saves = [0, *reference.saved_steps]
    # After the newest save, names sorted as text show; after an earlier one, what is saved after the resume.
    newest = max(step for step in saves if step < reference.length)
    earlier = max((step for step in saves if 0 < step < newest), default=newest)
    late, step = _after(reference, newest), _after(reference, earlier)
    stops = [f"kill@{late}", f"term@{step}"] + [f"rank1@{step}"] * (len(reference.ranks) > 1)
    written, torn = newest or saves[-1], earlier or saves[-1]
    names = {name for path in reference.disk.saves.get(written, ()) for name in PurePath(path).parts}
    if change := _last_change(reference, written, names):
        stops.append(f"write@{change}")
    sizes = {path: reference.files.get(path, 0) for path in reference.disk.saves.get(torn, ())}
    largest = max(sizes, key=sizes.__getitem__, default="")
    is_kept = len({*reference.disk.written.values()} & {*saves[1:]}) > 1  # an older one
    if is_kept and (change := _last_change(reference, torn, {PurePath(largest).name})):
        stops.append(f"torn@{change}")
    return stops


def _after(reference: Run, save: int) -> int:
    """Return the step in the middle between a save and the next one."""
    after = next((step for step in reference.saved_steps if step > save), reference.length)
    return min(save + (after - save + 1) // 2 + 1, reference.length)


def _last_change(reference: Run, save: int, names: Collection[str]) -> str:
    """Return the last change in a save of what has one of these names, as a stop counts it; empty without."""
    last = (0.0, "")
    end = next((step for step in reference.saved_steps if step > save), reference.length + 1)
    for rank in reference.ranks:
        changes = []
        for event in reference.of_kind("open", "rename", "remove", rank=rank):
            target = event.get("to") or event["path"]
            changes.append(f"{event['path']} {target}")
            is_of_save = save <= event["k"] < end and PurePath(target).name in names
            if is_of_save and event["e"] != "remove":
                last = max(last, (event["t"], f"{target}:{sum(target in change for change in changes)}"))
    return last[1]


@dataclass(frozen=True)
class Command:
    """The script's command: its words, the folder in which it was typed, and how it is recorded."""

    words: Sequence[str]
    cwd: Path
    every: int = 1
    grace_s: float = 30.0
    is_recorded: bool = True
    began: float = field(default_factory=time.time)
    """Seconds of the epoch: files of the user that were there before are protected."""

    @property
    def has_out(self) -> bool:
        """Whether it names the folder of its output."""
        return any(OUT in word for word in self.words)

    def run(self, place: Path, name: str, limit_s: float, stop: str = "", more: Sequence[str] = ()) -> Run:
        """Run the command in the folder of a run to its end, to a stop, or for as long as it may take. Its
        output is in `out`: an empty folder at first, or a copy of the working folder."""
        records, out, log = place / f"{name}-records", place / "out", place / f"{name}.log"
        records.mkdir(parents=True)
        if self.has_out:
            out.mkdir(exist_ok=True)
        elif not out.exists():
            WorkingFolder(self.cwd, place.parent).copy(out)
        settings = place / f"{name}.json"
        # A resumed run is recorded at each step: it is compared where the uninterrupted one is recorded.
        every = 1 if name == "resumed" else self.every
        known = {"records": str(records), "watched": str(out), "every": every, "stop": stop}
        named = [str(self.cwd), *paths_of([*self.words, *more], self.cwd)]
        write_json(settings, known | {"began": self.began, "own": [str(place.parent)], "named": named})
        words = [word.replace(OUT, str(out)) for word in (*self.words, *more)]
        words = words if self.has_out else WorkingFolder(self.cwd, place.parent).words(words, out)
        with log.open("wb") as output:
            status = self._status(words, output, settings, time.monotonic() + limit_s, stop)
        return Run.read(records, file_lengths(out), log, status)

    def _status(
        self, words: Sequence[str], output: BinaryIO, settings: Path, deadline: float, stop: str
    ) -> int | None:
        """Return the exit status; None where it took too long."""
        path = os.pathsep.join(filter(None, [str(RECORDER), os.environ.get("PYTHONPATH")]))
        environment = OFFLINE | os.environ
        if self.is_recorded:
            environment |= {"PYTHONPATH": path, "DCPBENCH_SCRIPT": str(settings)}
        if SAFE_PATH in environment.items():  # of dcpbench alone: a script imports its neighbours
            del environment[SAFE_PATH[0]]
        cwd = self.cwd if self.has_out else settings.with_name("out")
        is_stopped = False
        try:
            with Process(words, cwd, environment, output) as process:
                while (status := process.poll()) is None:
                    if settings.with_name(f"{settings.stem}-records").joinpath("harm").exists():
                        return -signal.SIGKILL
                    if not is_stopped and any(settings.parent.glob(f"{settings.stem}-records/stopped-*")):
                        is_stopped = True
                        # A process that is to be killed has stopped.
                        deadline = time.monotonic() + (self.grace_s if stop.startswith(_GENTLE) else 0)
                    if time.monotonic() > deadline:
                        return -signal.SIGKILL if is_stopped else None
                    time.sleep(_POLL_S)
                return status
        except OSError as error:
            raise ConfigError(f"{words[0]}: cannot be started: {error.strerror}") from None
