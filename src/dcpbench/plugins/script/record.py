"""Read what the recorder wrote: the steps of each rank, and which files belong to which save.

A record comes from the script's processes, so every line can be damaged; damaged ones are left out. It is
JSON, and nothing in it is evaluated.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from dcpbench.records import files
from dcpbench.records.row_reader import dict_in, list_in

Event = dict[str, Any]
Named = Mapping[str, Any]


@dataclass(frozen=True)
class Step:
    """What an optimizer step depends on: for each kind of state its values by name.

    Args:
        number: of this optimizer's steps in this process, from 1.
        optimizer: its number in the order of first steps.
        parts: values by name, by kind; a kind that was not recorded is missing.
        generators: states of random generators before the forward pass.
        done: steps that the first optimizer had made.
    """

    number: int
    optimizer: int
    parts: Mapping[str, Named]
    generators: Named
    done: int

    @property
    def at(self) -> int:
        """The step of the first optimizer that it is, or follows."""
        return self.done + (not self.optimizer)


@dataclass(frozen=True)
class Save:
    """A save: after how many steps, where, and the digests of what was saved."""

    done: int
    path: str
    content: Named


@dataclass
class Process:
    """The events of one process."""

    events: list[Event]

    @cached_property
    def steps(self) -> list[Step]:
        """Its optimizer steps."""
        names: dict[tuple[int, str], list[str]] = {}
        return [_step(event, names) for event in self.events if event["e"] == "step"]

    @property
    def rank(self) -> int:
        """Its rank, of a process that trains."""
        return next(int(event["rank"]) for event in self.events if event["e"] == "step")

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
        ranks: dict[int, Process] = {}
        for process in sorted((one for one in self.processes if one.steps), key=lambda one: len(one.steps)):
            ranks[process.rank] = process
        return dict(sorted(ranks.items()))

    @property
    def about(self) -> Mapping[str, Any]:
        """What rank 0 knows about its torch and its models."""
        for process in self.ranks.values():
            for event in process.of_kind("step"):
                if "about" in event:
                    return dict_in(event["about"])
        return {}

    @property
    def length(self) -> int:
        """The number of steps of the first optimizer."""
        counts = [sum(not step.optimizer for step in one.steps) for one in self.ranks.values()]
        return max(counts, default=0)

    @property
    def stop(self) -> Event | None:
        """The first event of the stop that was asked for."""
        stops = [event for one in self.processes for event in one.of_kind("stop")]
        return min(stops, key=lambda event: event["t"], default=None)

    @property
    def broken(self) -> list[str]:
        """What the recorder could not do."""
        return [str(event.get("error")) for one in self.processes for event in one.of_kind("broken")]

    @cached_property
    def disk(self) -> "Disk":
        """The files at the end, with the saves that they belong to."""
        return Disk(self.processes)

    def saves(self, rank: int) -> list[Save]:
        """Return the saves of a rank."""
        return [
            Save(int(event["k"]), str(event["path"]), dict_in(event.get("content")))
            for event in self.ranks[rank].of_kind("save")
        ]

    def paths_read(self) -> tuple[list[str], list[str]]:
        """Return the paths that were loaded before the first step, and all files that were read."""
        loaded: dict[str, None] = {}
        read: dict[str, None] = {}
        for process in self.processes:
            for event in process.events:
                if event["e"] == "step":
                    break
                if event["e"] in ("load", "read"):
                    (loaded if event["e"] == "load" else read)[str(event["path"])] = None
        return [*loaded], [*read]


class Disk:
    """The watched folder, as the events of all processes made it.

    `written` has for each file the save that it belongs to: how many steps were done when that began.
    `sessions` has the files of each save when it was complete, before the next one began; `kept` has the
    saves whose files existed then.
    """

    def __init__(self, processes: Iterable[Process]) -> None:
        self.written: dict[str, int] = {}
        self.sessions: dict[int, set[str]] = {}
        self.kept: dict[int, set[int]] = {}
        self._saving: dict[str, int] = {}
        self._unfinished: dict[tuple[int, str], None] = {}
        self._outside: set[str] = set()
        merged = [
            (event["t"], number, event, bool(process.steps))
            for number, process in enumerate(processes)
            for event in process.events
        ]
        self._now = 0
        for _, number, event, trains in sorted(merged, key=lambda item: item[:2]):
            self._now = max(self._now, int(event["k"])) if trains else self._now
            self._apply(event, number, int(event["k"]) if trains else self._now)
        self._end_session()
        for paths in self.sessions.values():
            paths -= self._outside

    @property
    def unfinished(self) -> list[str]:
        """The paths of saves that did not return."""
        return [path for _, path in self._unfinished]

    def step_of(self, path: str) -> int | None:
        """Return the newest save that a file, or a file below a folder, belongs to."""
        below = [step for name, step in self.written.items() if _is_in(name, path) or _is_in(path, name)]
        return max(below, default=None)

    def _apply(self, event: Event, process: int, done: int) -> None:
        kind, path = event["e"], str(event.get("path"))
        if kind == "save":
            if done > max(self.sessions, default=-1):
                self._end_session()
                self.sessions[done] = set()
            self._saving[path] = max(done, self._saving.get(path, 0))
            self._unfinished[process, path] = None
        elif kind == "saved":
            self._unfinished.pop((process, path), None)
            self._keep()
        elif kind == "open":
            within = [step for place, step in self._saving.items() if _is_in(path, place)]
            self.written[path] = max(within, default=done)
            if not within and done not in self.sessions:
                self._outside.add(path)
        elif kind == "rename":
            to = str(event["to"])
            for name in [name for name in self.written if _is_in(name, path)]:
                self.written[to + name[len(path) :]] = self.written.pop(name)
            self._keep()
        elif kind == "remove":
            for name in [name for name in self.written if _is_in(name, path)]:
                del self.written[name]

    def _end_session(self) -> None:
        newest = max(self.sessions, default=None)
        if newest is not None:
            self.sessions[newest] = {path for path, step in self.written.items() if step == newest}

    def _keep(self) -> None:
        if self.sessions:
            self.kept[max(self.sessions)] = {*self.written.values()} & self.sessions.keys()


def newest_complete(reference: Disk, stopped: Recording, cut: str) -> int | None:
    """Return the newest save whose files are all there, as in the reference; `cut` is a file that is not
    complete."""
    incomplete = [cut, *stopped.disk.unfinished] if cut else stopped.disk.unfinished
    written = stopped.disk.written
    for done in sorted(reference.sessions, reverse=True):
        paths = reference.sessions[done]
        there = all(written.get(path) == done and stopped.files.get(path) for path in paths)
        if paths and there and not any(_is_in(path, place) for path in paths for place in incomplete):
            return done
    return None


def _is_in(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder}/")


def _step(event: Event, names: dict[tuple[int, str], list[str]]) -> Step:
    optimizer = int(event["o"])
    for kind, keys in dict_in(event.get("names")).items():
        names[optimizer, kind] = [str(key) for key in list_in(keys)]
    parts: dict[str, Named] = {
        kind: dict(zip(names[of, kind], event[kind], strict=False))
        for of, kind in names
        if of == optimizer and kind in event
    }
    groups = map(dict_in, list_in(event.get("hyper")))
    parts["hyper"] = {
        f"group {place} {key}": value for place, of in enumerate(groups) for key, value in of.items()
    }
    parts["modes"] = dict_in(event.get("modes"))
    return Step(int(event["n"]) + 1, optimizer, parts, dict_in(event.get("generators")), int(event["k"]))


def _events(path: Path) -> Iterator[Event]:
    needed: dict[str, tuple[str, ...]] = defaultdict(tuple, rename=("path", "to"), step=("o", "n", "rank"))
    for line in files.lines(path):
        try:
            event = json.loads(line)
            if {"e", "k", "t", *needed[str(event["e"])]} <= event.keys():
                yield event
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            continue
