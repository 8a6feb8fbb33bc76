"""A folder as a crash leaves it: copied while all its processes are stopped, and put back to be resumed."""

import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from dcpbench.plugins.script.checkpoints import Event, is_in
from dcpbench.records.store import write_json

_LIBRARY = ctypes.CDLL(None)
_TOUCH_S = 10.0
"""Longest time for giving files the order in which they were changed."""


@dataclass(frozen=True)
class Copy:
    """The folder of a run at a stop.

    Args:
        folder: a copy of it.
        time: when the processes were stopped, by the clock of the records.
        event: where the stopped process was.
        writing: paths in it that processes had open to write, each with their ids.
        changed: paths in it in the order of their change times, which a copy does not keep.
    """

    folder: Path
    time: float
    event: Event
    writing: Mapping[str, Sequence[int]] = field(default_factory=dict)
    changed: Sequence[tuple[int, str]] = field(default=(), repr=False)

    @classmethod
    def taken(
        cls, out: Path, folder: Path, at: float, event: Event, writing: Mapping[str, Sequence[int]]
    ) -> "Copy":
        """Copy a folder, and cut the file that the stop cuts."""
        copy = cls(folder, at, event, writing, change_times(out))
        shutil.rmtree(folder, ignore_errors=True)  # a copy of a frozen run that failed
        copy_folder(out, folder)
        for path in copy.cut:
            with suppress(OSError), (folder / path).open("ab") as file:
                file.truncate({"half": file.tell() // 2, "empty": 0, "made": None}[event["cut"]])
        write_json(copy.about(folder), vars(copy) | {"folder": str(folder)})
        return copy

    @property
    def cut(self) -> frozenset[str]:
        """The path in it that the stop cut, if any."""
        return frozenset({self.event["path"]} if self.event.get("cut") else ())

    @staticmethod
    def about(folder: Path) -> Path:
        """Return the path of the file that describes the copy in a folder."""
        return folder.with_name("copy.json")

    @classmethod
    def kept(cls, folder: Path) -> "Copy | None":
        """Return the copy in a folder that an earlier check made; None if there is none."""
        if not (folder.exists() and cls.about(folder).exists()):
            return None
        return cls(**json.loads(cls.about(folder).read_text()) | {"folder": folder})

    def newest(self, pattern: str) -> tuple[str, str] | None:
        """Return the newest path in it that fits a pattern such as `checkpoint-*` and was not being written,
        by the number that `*` stands for or else by its modification time, and the digits of that number."""
        fits = re.compile(re.escape(pattern).replace(r"\*", "(.*)") + "$")
        found = []
        for place in self.folder.glob(pattern):
            path = str(place.relative_to(self.folder))
            digits = re.findall(r"\d+", " ".join(match.groups())) if (match := fits.match(path)) else []
            if not any(is_in(cut, path) for cut in (*self.cut, *self.writing)):
                found.append((int(digits[-1]) if digits else -1, place.stat().st_mtime_ns, path, digits))
        return (max(found)[2], "".join(max(found)[3][-1:])) if found else None

    def put(self, out: Path) -> None:
        """Put the folder back, with the order of its change times: scripts choose by them."""
        shutil.rmtree(out, ignore_errors=True)
        copy_folder(self.folder, out)
        last, last_changed, deadline = 0, 0, time.monotonic() + _TOUCH_S
        for changed, path in self.changed:
            place = out / path
            with suppress(OSError):
                status = place.lstat()
                times = (status.st_atime_ns, status.st_mtime_ns)
                os.utime(place, ns=times, follow_symlinks=False)
                # The clock of a file system moves in steps of milliseconds.
                while (now := place.lstat().st_ctime_ns) <= last and changed > last_changed:
                    if time.monotonic() > deadline:
                        break
                    time.sleep(0.001)
                    os.utime(place, ns=times, follow_symlinks=False)
                last, last_changed = now, changed


def copy_folder(source: Path, target: Path) -> None:
    """Copy a folder with its times, links, hard links and holes; by reference where the file system can."""
    target.parent.mkdir(parents=True, exist_ok=True)
    pr_set_pdeathsig = 1  # end if dcpbench is killed: the guardian of the command does not know this process
    subprocess.run(
        ["cp", "-a", "--reflink=auto", "--", source, target], check=True, stdin=subprocess.DEVNULL,
        preexec_fn=lambda: _LIBRARY.prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0),
    )  # fmt: skip


def change_times(folder: Path) -> list[tuple[int, str]]:
    """Return the change times, in nanoseconds, and paths of all that is below a folder, the oldest first."""
    found = []
    for path in folder.rglob("*"):
        with suppress(OSError):
            found.append((path.lstat().st_ctime_ns, str(path.relative_to(folder))))
    return sorted(found)


def open_for_writing(processes: Iterable[psutil.Process], folder: Path) -> dict[str, list[int]]:
    """Return the paths below a folder that processes have open, or mapped, to write and not to append, each
    with the ids of the processes."""
    prefix, writing = f"{folder}/", defaultdict[str, list[int]](list)
    for process in processes:
        with suppress(psutil.Error, OSError):
            lines = Path(f"/proc/{process.pid}/maps").read_text(errors="replace").splitlines()
            mapped = [columns for line in lines if len(columns := line.split(maxsplit=5)) == 6]
            paths = [columns[5] for columns in mapped if columns[1].startswith(("rw-s", "-w-s"))]
            paths += [file.path for file in process.open_files() if file.mode in ("w", "r+", "w+")]
            for path in {path.removeprefix(prefix) for path in paths if path.startswith(prefix)}:
                writing[path].append(process.pid)
    return dict(writing)
