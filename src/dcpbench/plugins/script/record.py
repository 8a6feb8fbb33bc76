"""A run of the command as it was recorded: the steps of each rank, and which files belong to which save."""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from dcpbench.config.text import clipped
from dcpbench.records import files

Event = dict[str, Any]
"""An event of a process: the kind `e` of event, how many steps it had made (`k`), the time `t`, and more. A
step has `parts`: for each kind of state its values by name; a kind that was not recorded is missing."""
Named = Mapping[str, Any]
_ERROR = re.compile(r"(?:\[rank\d+\]:\s*)?((?:\w+\.)*\w*(?:Error|Exception|Exit|Interrupt)\b.*)")

_CODE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[ -/]*[0-Z^-~])")
_CUT = re.compile(r"(?:\[enforce fail at [^]]*\] ?\. )?PytorchStreamReader failed reading zip archive.*")


@dataclass
class Run:
    """A run of the command: the events of all processes by time, the lengths of the files below the watched
    folder at the end, its output, and its exit status, None if it was ended because it took too long."""

    events: Sequence[Event]
    files: Mapping[str, int]
    log: Path
    status: int | None = 0

    @classmethod
    def read(cls, records: Path, lengths: Mapping[str, int], log: Path, status: int | None = 0) -> "Run":
        """Read the records in a folder."""
        events: list[Event] = []
        for path in records.glob("*.jsonl"):
            for line in files.lines(path):
                with suppress(ValueError):  # a process was killed while it wrote the line
                    events.append({**json.loads(line), "process": path.stem})
        events.sort(key=lambda event: event["t"])
        _date_saves(events)
        return cls(events, lengths, log, status)

    def of_kind(self, *kinds: str, rank: int | None = None) -> list[Event]:
        """Return the events of these kinds, of all processes or of that of a rank."""
        events = [event for event in self.events if event["e"] in kinds]
        process = self._processes.get(rank) if rank is not None else None
        return [event for event in events if rank is None or event["process"] == process]

    @cached_property
    def _processes(self) -> dict[int, str]:
        """The process of each rank: of several the one with most steps."""
        steps = Counter((event["rank"], event["process"]) for event in self.of_kind("step"))
        return {rank: process for (rank, process), _ in reversed(steps.most_common())}

    @cached_property
    def ranks(self) -> dict[int, list[Event]]:
        """The steps of each rank that made one."""
        return {rank: self.of_kind("step", rank=rank) for rank in sorted(self._processes)}

    @property
    def about(self) -> Named:
        """Facts of the first rank about its torch and its models."""
        return self.of_kind("about", rank=min(self.ranks))[0]

    @property
    def length(self) -> int:
        """The number of steps of the first optimizer."""
        return max((number(step) for steps in self.ranks.values() for step in steps), default=0)

    @property
    def saved_steps(self) -> list[int]:
        """The steps after which it saved files; not the start."""
        return sorted(step for step, paths in self.disk.saves.items() if step > 0 and paths)

    @property
    def cut(self) -> str:
        """The file that was not complete when the run was stopped; empty if there is none."""
        return next((event["path"] for event in self.of_kind("stop")), "")

    @property
    def said(self) -> str:
        """The first line of the log that names an error, or its last line, without a terminal's codes."""
        lines = _CODE.sub("", self.log.read_text(errors="replace")).splitlines()
        errors = [match[1] for match in map(_ERROR.match, lines) if match]
        line = [*errors, *[*filter(str.strip, lines)][-1:], "it printed nothing"][0]
        return clipped(_CUT.sub("not a zip archive: cut", line), 200)

    @property
    def failure(self) -> str:
        """The exit status and what it said, or the file of the user that it was about to change."""
        if harm := self.of_kind("harm"):
            return f"ended before it changes {harm[0]['path']}, which was there before ({harm[0]['change']})"
        return f"exit status {self.status}: {self.said}"

    @cached_property
    def disk(self) -> "Disk":
        """The files at the end, with the saves that they belong to."""
        return Disk(self.events)

    def contents(self, rank: int, base: int = 0) -> dict[tuple[int, str], Named]:
        """Return what a rank saved, by how many steps after `base` it had made and the file's name."""
        return {
            (base + event["k"], event["path"].rpartition("/")[2]): event["content"]
            for event in self.of_kind("save", rank=rank)
        }

    def paths_read(self) -> list[str]:
        """Return the paths that were loaded before the first step, or if there is none that were read."""
        first = [event for event in self.of_kind("load", "read") if not event["k"]]
        loads = [event for event in first if event["e"] == "load"]
        return [*dict.fromkeys(event["path"] for event in loads or first)]


class Disk:
    """The watched folder by the events of all processes: the save of each file, which is how many steps were
    done when it began; the files of each save, also replaced ones; saves in flight; files moved later."""

    def __init__(self, events: Sequence[Event]) -> None:
        dates = {event["k"] for event in events if event["e"] == "save"}
        self.written: dict[str, int] = {}
        self.unfinished: set[tuple[str, str]] = set()
        self.backups: dict[str, str] = {}
        changed: defaultdict[int, set[str]] = defaultdict(set)
        saving: dict[str, int] = {}
        saved: set[int] = set()
        now = 0
        for event in events:
            now = max(now, event["k"])
            kind, path, done = event["e"], event.get("path", ""), event["k"] or now
            if kind == "save":
                saving[path] = max(done, saving.get(path, 0))
                saved.add(done)
                self.unfinished.add((event["process"], path))
            elif kind == "saved":
                self.unfinished.discard((event["process"], path))
            elif kind == "open":
                within = [step for place, step in saving.items() if is_in(path, place)]
                self.written[path] = max(within, default=done)
                changed[self.written[path]].add(path)
            elif kind in ("rename", "remove"):
                for name in [name for name in self.written if is_in(name, path)]:
                    step = self.written.pop(name)
                    publishes = kind == "rename" and not any(step < other <= done for other in dates)
                    if publishes or step == done:
                        changed[step].discard(name)
                    if kind == "rename":
                        renamed = event["to"] + name[len(path) :]
                        self.written[renamed] = step
                        if publishes:
                            changed[step].add(renamed)
                        else:  # a later save moves it out of the way
                            self.backups[renamed] = self.backups.get(name, name)
        # Files that change at other steps too, such as logs, are of no save.
        others = {path for step, paths in changed.items() if step not in saved for path in paths}
        self.saves = {step: changed[step] - others for step in saved}

    def step_of(self, path: str) -> int | None:
        """Return the newest save that a file, or a file below a folder, belongs to."""
        below = [step for name, step in self.written.items() if is_in(name, path) or is_in(path, name)]
        return max(below, default=None)


def number(step: Event) -> int:
    """Return the step of the first optimizer that a step is, or follows."""
    return int(step["k"]) + (not step["optimizer"])


def _date_saves(events: Sequence[Event]) -> None:
    """Correct after how many steps a save was made that a later thread or process wrote, by its weights."""
    steps = [event for event in events if event["e"] == "step" and event["parts"].get("weights")]
    weights = [(step["k"], {*step["parts"]["weights"].values()}) for step in steps if not step["optimizer"]]
    for save in (event for event in events if event["e"] == "save"):
        content = {*save["content"].values()}
        same = max((done for done, of in weights if done <= save["k"] and of <= content), default=-1)
        if any(done == same + 1 > 0 for done, _ in weights):  # after the last step, weights are not known
            save["k"] = same


def newest_complete(reference: Run, stopped: Run) -> int | None:
    """Return the newest save whose files are all there: as in the reference, or one that it did not make (on
    SIGTERM, by time) and the stop did not interrupt."""
    incomplete = [path for _, path in stopped.disk.unfinished] + [stopped.cut]
    stops = {event["k"] for event in stopped.of_kind("stop") if event["change"]}
    more = {done: paths for done, paths in stopped.disk.saves.items() if done not in stops}
    files = [path for path, length in stopped.files.items() if length and path in stopped.disk.written]
    whole = [path for path in files if not any(is_in(path, place) for place in incomplete)]
    for done, paths in sorted((more | reference.disk.saves).items(), reverse=True):
        there = {stopped.disk.backups.get(path, path) for path in whole if stopped.disk.written[path] == done}
        if paths and paths <= there:
            return done
    return None


def is_in(path: str, folder: str) -> bool:
    """Tell whether a path is another one, or below it."""
    return path == folder or path.startswith(f"{folder}/")
