"""Read what the recorder wrote: the steps of each rank, and which files belong to which save."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from dcpbench.records import files

Event = dict[str, Any]
Named = Mapping[str, Any]


@dataclass(frozen=True)
class Step:
    """What an optimizer step depends on: for each kind of state its values by name.

    Args:
        optimizer: its number in the order of first steps.
        parts: values by name, by kind; a kind that was not recorded is missing.
        generators: states of random generators before the forward pass.
        done: steps that the first optimizer had made.
    """

    optimizer: int
    parts: Mapping[str, Named]
    generators: Named
    done: int

    @property
    def at(self) -> int:
        """The step of the first optimizer that it is, or follows."""
        return self.done + (not self.optimizer)


@dataclass
class Process:
    """The events of one process."""

    events: list[Event]

    @cached_property
    def steps(self) -> list[Step]:
        """Its optimizer steps."""
        return [
            Step(event["optimizer"], event["parts"], event["generators"], event["k"])
            for event in self.of_kind("step")
        ]

    def of_kind(self, *kinds: str) -> list[Event]:
        """Return its events of these kinds."""
        return [event for event in self.events if event["e"] in kinds]


@dataclass
class Recording:
    """What all processes of one run recorded.

    Args:
        files: the lengths of the files below the watched folder when the run had ended, by path.
    """

    processes: Sequence[Process]
    files: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path, files: Mapping[str, int]) -> "Recording":
        """Read the records in a folder."""
        return cls([Process([*_events(path)]) for path in sorted(folder.glob("*.jsonl"))], files)

    @cached_property
    def ranks(self) -> dict[int, Process]:
        """The process of each rank: of several the one with most steps."""
        trained = sorted(
            (process for process in self.processes if process.steps), key=lambda process: len(process.steps)
        )
        ranks = {int(process.of_kind("step")[0]["rank"]): process for process in trained}
        return dict(sorted(ranks.items()))

    @property
    def about(self) -> Mapping[str, Any]:
        """What the first rank knows about its torch and its models."""
        return next(event for process in self.ranks.values() for event in process.of_kind("about"))

    @property
    def length(self) -> int:
        """The number of steps of the first optimizer."""
        counts = [sum(not step.optimizer for step in process.steps) for process in self.ranks.values()]
        return max(counts, default=0)

    @property
    def stop(self) -> Event | None:
        """The first event of the stop that was asked for."""
        return min(self._of_all("stop"), key=lambda event: event["t"], default=None)

    @property
    def broken(self) -> list[str]:
        """What the recorder could not do."""
        return [str(event["error"]) for event in self._of_all("broken")]

    @cached_property
    def disk(self) -> "Disk":
        """The files at the end, with the saves that they belong to."""
        return Disk(self.processes)

    def saves(self, rank: int, base: int = 0) -> dict[tuple[int, str], Named]:
        """Return what a rank saved, by how many steps after `base` it had made and the file's name; nothing
        of a rank that made no step."""
        events = self.ranks[rank].of_kind("save") if rank in self.ranks else []
        return {(base + event["k"], event["path"].rpartition("/")[2]): event["content"] for event in events}

    def paths_read(self) -> tuple[list[str], list[str]]:
        """Return the paths that were loaded before the first step, and all files that were read."""
        paths: dict[str, list[str]] = {"load": [], "read": []}
        for process in self.processes:
            for event in process.of_kind("load", "read", "step"):
                if event["e"] == "step":
                    break
                paths[event["e"]].append(event["path"])
        return [*dict.fromkeys(paths["load"])], [*dict.fromkeys(paths["read"])]

    def _of_all(self, kind: str) -> list[Event]:
        return [event for process in self.processes for event in process.of_kind(kind)]


class Disk:
    """The watched folder, as the events of all processes made it.

    `written` has for each file the save that it belongs to: how many steps were done when that began.
    `sessions` has the files of each save when it was complete, before the next one began.
    """

    def __init__(self, processes: Iterable[Process]) -> None:
        self.written: dict[str, int] = {}
        self.sessions: dict[int, set[str]] = {}
        self._saving: dict[str, int] = {}
        self._unfinished: set[tuple[int, str]] = set()
        self._outside: set[str] = set()
        merged = [
            (event["t"], number, event, bool(process.steps))
            for number, process in enumerate(processes)
            for event in process.events
        ]
        now = 0
        for _, number, event, trains in sorted(merged, key=lambda item: item[:2]):
            now = max(now, event["k"]) if trains else now
            self._apply(event, number, event["k"] if trains else now)
        self._end_session()
        for paths in self.sessions.values():
            paths -= self._outside

    @property
    def unfinished(self) -> list[str]:
        """The paths of saves that did not return."""
        return [path for _, path in self._unfinished]

    def step_of(self, path: str) -> int | None:
        """Return the newest save that a file, or a file below a folder, belongs to."""
        below = [step for name, step in self.written.items() if is_in(name, path) or is_in(path, name)]
        return max(below, default=None)

    def _apply(self, event: Event, process: int, done: int) -> None:
        kind, path = event["e"], str(event.get("path"))
        if kind == "save":
            if done > max(self.sessions, default=-1):
                self._end_session()
                self.sessions[done] = set()
            self._saving[path] = max(done, self._saving.get(path, 0))
            self._unfinished.add((process, path))
        elif kind == "saved":
            self._unfinished.discard((process, path))
        elif kind == "open":
            within = [step for place, step in self._saving.items() if is_in(path, place)]
            self.written[path] = max(within, default=done)
            if not within and done not in self.sessions:
                self._outside.add(path)
        elif kind in ("rename", "remove"):
            for name in [name for name in self.written if is_in(name, path)]:
                step = self.written.pop(name)
                if kind == "rename":
                    self.written[event["to"] + name[len(path) :]] = step

    def _end_session(self) -> None:
        if self.sessions:
            newest = max(self.sessions)
            self.sessions[newest] = {path for path, step in self.written.items() if step == newest}


def newest_complete(reference: Disk, stopped: Recording, cut: str) -> int | None:
    """Return the newest save whose files are all there, as in the reference; `cut` is a file that is not
    complete."""
    incomplete = [*stopped.disk.unfinished, *filter(None, [cut])]
    for done, paths in sorted(reference.sessions.items(), reverse=True):
        there = all(stopped.disk.written.get(path) == done and stopped.files.get(path) for path in paths)
        if paths and there and not any(is_in(path, place) for path in paths for place in incomplete):
            return done
    return None


def is_in(path: str, folder: str) -> bool:
    """Tell whether a path is another one, or below it."""
    return path == folder or path.startswith(f"{folder}/")


def _events(path: Path) -> Iterator[Event]:
    for line in files.lines(path):
        with suppress(ValueError):  # a process was killed while it wrote the line
            yield json.loads(line)
