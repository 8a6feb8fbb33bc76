"""Start the command, stop it, and end all processes that it started."""

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from dcpbench.config.errors import ConfigError
from dcpbench.config.text import size_text
from dcpbench.plugins.script.record import Recording
from dcpbench.records.files import file_lengths

OUT = "{out}"
OFFLINE = {"WANDB_MODE": "offline", "NEPTUNE_MODE": "offline", "CLEARML_OFFLINE_MODE": "1"}
"""Variables that keep these runs out of the loggers of a team, set where the user has not set them."""
_VARIABLE = "DCPBENCH_SCRIPT"
_MOST_COPIED = 2 * 1024**3
_POLL_S = 0.02
_STOP = re.compile(
    r"((?P<at_step>kill|term)@|rank(?P<rank>\d{1,6})@|(?P<at_change>write|torn)@(?P<part>.+):)"
    r"(?P<number>0*[1-9]\d{0,8})",
    re.ASCII,
)
RECORDER = Path(__file__).parent / "recorder"
"""The folder that starts the recorder, first in PYTHONPATH."""


@dataclass(frozen=True)
class Stop:
    """Where a run is stopped.

    >>> str(Stop.parse("write@step-8:3")), str(Stop.parse("rank1@9"))
    ('write@step-8:3', 'rank1@9')

    Args:
        kind: `kill` all ranks, `rank`: kill one, `term`: send SIGTERM, before step `number`; `write`: kill
            all at change `number` of a file with `part` in its path; `torn`: cut it to half after that too.
        rank: the rank to kill.
    """

    kind: str
    number: int
    rank: int | None = None
    part: str = ""

    @classmethod
    def parse(cls, text: str) -> "Stop":
        """Read a stop as it is typed.

        Raises:
            ConfigError: it is not one.
        """
        match = _STOP.fullmatch(text)
        if match is None:
            expected = "kill@STEP, term@STEP, rank1@STEP, write@PART:N or torn@PART:N"
            raise ConfigError(f"--stop {text}: expected {expected}")
        kind = match["at_step"] or match["at_change"] or "rank"
        return cls(
            kind, int(match["number"]), int(match["rank"]) if match["rank"] else None, match["part"] or ""
        )

    def __str__(self) -> str:
        part = f"{self.part}:" if self.part else ""
        return f"{self.kind}{'' if self.rank is None else self.rank}@{part}{self.number}"


@dataclass(frozen=True)
class Ended:
    """How a run of the command ended.

    Args:
        status: its exit status; None if it was ended because it took too long.
        seconds: how long it ran.
        log: its output.
        left_behind: how many processes it left, which were ended.
    """

    status: int | None
    seconds: float
    log: Path
    recording: Recording
    left_behind: int


@dataclass(frozen=True)
class Command:
    """The script's command: its words, the folder in which it was typed, and how it is recorded."""

    words: Sequence[str]
    cwd: Path
    every: int = 1
    grace_s: float = 30.0

    @property
    def has_out(self) -> bool:
        """Whether it names the folder of its output."""
        return any(OUT in word for word in self.words)

    def prepare(self, place: Path) -> None:
        """Make the folder of a run: an empty one, or a copy of the working folder.

        Raises:
            ConfigError: the working folder is too large to be copied.
        """
        place.mkdir(parents=True)
        if self.has_out:
            (place / "out").mkdir()
            return
        self.copied_size()
        shutil.copytree(
            self.cwd, place / "out", symlinks=True,
            ignore=lambda folder, names: [n for n in names if n == ".git" or Path(folder, n) == place.parent],
        )  # fmt: skip

    def copied_size(self) -> int:
        """Return how many bytes are copied for each stop."""
        size = sum(file_lengths(self.cwd).values())
        if size > _MOST_COPIED:
            raise ConfigError(
                f"{self.cwd} has {size_text(size)}, too much to copy for each stop: write {OUT} where the "
                f"command names the folder of its output"
            )
        return size

    def run(
        self, place: Path, name: str, limit_s: float, stop: Stop | None = None, more: Sequence[str] = ()
    ) -> Ended:
        """Run the command in the folder of a run to its end, to a stop, or for as long as it may take."""
        records, out, log = place / f"{name}-records", place / "out", place / f"{name}.log"
        records.mkdir()
        settings = place / f"{name}.json"
        known = {"records": str(records), "watched": str(out), "every": self.every}
        settings.write_text(json.dumps(known | {"stop": asdict(stop) if stop else {}}))
        words = [word.replace(OUT, str(out)) for word in (*self.words, *more)]
        began = time.monotonic()
        with log.open("wb") as output:
            try:
                process = subprocess.Popen(
                    words, cwd=self.cwd if self.has_out else out, env=_environment(settings),
                    stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                raise ConfigError(f"{words[0]}: cannot be started: {error.strerror}") from None
            try:
                is_gentle = stop is not None and stop.kind in ("term", "rank")
                status = self._wait(process, records, began + limit_s, is_gentle)
            finally:
                left_behind = end_processes(settings)
                process.wait()
        seconds = time.monotonic() - began
        return Ended(status, seconds, log, Recording.read(records, file_lengths(out)), left_behind)

    def _wait(
        self, process: "subprocess.Popen[bytes]", records: Path, deadline: float, is_gentle: bool
    ) -> int | None:
        """Return the exit status; None where it took too long. After a signal the command has some seconds,
        as a scheduler allows."""
        signalled = False
        while process.poll() is None:
            if not signalled and any(path.suffix == "" for path in records.iterdir()):
                signalled, deadline = True, time.monotonic() + (self.grace_s if is_gentle else 0)
            if time.monotonic() > deadline:
                return -signal.SIGKILL if signalled else None
            time.sleep(_POLL_S)
        return process.returncode


def end_processes(settings: Path) -> int:
    """End all processes of a run, and return how many there were."""
    ended: set[int] = set()
    while left := [process for process in psutil.process_iter() if _is_of(process, settings)]:
        ended |= {process.pid for process in left}
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=5)
    return len(ended)


def _is_of(process: psutil.Process, settings: Path) -> bool:
    """Tell whether a process is one of a run, and runs."""
    with suppress(psutil.Error, OSError):
        runs = process.status() != psutil.STATUS_ZOMBIE
        return runs and process.environ().get(_VARIABLE) == str(settings)
    return False


def _environment(settings: Path) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(RECORDER), os.environ.get("PYTHONPATH")]))
    return OFFLINE | os.environ | {"PYTHONPATH": path, _VARIABLE: str(settings)}
