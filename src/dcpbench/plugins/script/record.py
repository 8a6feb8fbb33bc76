"""A run of the command as it was recorded: the steps of each rank, and what it saved and read."""

import json
import re
import signal
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from dcpbench.config.text import clipped
from dcpbench.plugins.script.checkpoints import Disk, Event, Named, Save, is_in
from dcpbench.records import files

_STATE = ("weights", "moments")
_ERROR = re.compile(r"(?:\[rank(\d+)\]:\s*)?((?:\w+\.)*\w*(?:Error|Exception|Exit|Interrupt)\b.*)")

_FAILED_FIRST = re.compile(r"Root Cause .*?rank +: (\d+) .*?exitcode +: (-?\d+) ", re.DOTALL)
"""torchrun's report of the rank that failed first; the others end because of it."""
_CODE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[ -/]*[0-Z^-~])")
_WORD = re.compile(r"[^\W_]")
_CUT = re.compile(r"(?:\[enforce fail at [^]]*\] ?\. )?PytorchStreamReader failed reading zip archive.*")


@dataclass
class RecordedRun:
    """A run of the command: the events of all processes by time, its output, and its exit status, None if it
    was ended because it took too long."""

    events: Sequence[Event]
    log: Path
    status: int | None = 0

    @classmethod
    def read(cls, records: Path, log: Path, status: int | None = 0) -> "RecordedRun":
        """Read the records in a folder."""
        events: list[Event] = []
        for path in records.glob("*.jsonl"):
            for line in files.lines(path):
                with suppress(ValueError):  # a process was killed while it wrote the line
                    events.append({**json.loads(line), "process": path.stem})
        events.sort(key=lambda event: event["t"])
        return cls(events, log, status)

    def until(self, time: float) -> "RecordedRun":
        """Return the run as it was at a time."""
        return replace(self, events=[event for event in self.events if event["t"] <= time])

    def split(self, time: float) -> tuple["RecordedRun", "RecordedRun"]:
        """Return the parts of a run whose launcher starts it again after a time: the processes that were
        started before, and those that were started later."""
        first = {event["process"]: event["t"] for event in reversed(self.events)}
        parts = [[event for event in self.events if (first[event["process"]] > time) is later]
                 for later in (False, True)]  # fmt: skip
        return replace(self, events=parts[0]), replace(self, events=parts[1])

    def synced(self, stop: Event) -> bool:
        """Tell whether the file that a stop cuts was on the disk before it was published, or before another
        file was changed: then no power loss leaves it cut."""
        path, is_published = stop["path"], False
        for event in reversed(self.until(stop["t"]).of_kind("open", "rename", "link", "remove", "sync")):
            if event["e"] == "sync" and event["path"] in ("", path):
                return is_published
            if event["e"] == "open" and event["path"] == path:
                return False
            if event["e"] in ("rename", "link") and is_in(path, event["to"]):
                path = event["path"] + path[len(event["to"]) :]
            is_published |= event["e"] != "sync"
        return False

    def of_kind(self, *kinds: str) -> list[Event]:
        """Return the events of these kinds."""
        return [event for event in self.events if event["e"] in kinds]

    @cached_property
    def ranks(self) -> dict[int, list[Event]]:
        """The steps of each rank that made one: those of the process with most."""
        steps = defaultdict[int, dict[str, list[Event]]](dict)
        for event in self.of_kind("step"):
            steps[event["rank"]].setdefault(event["process"], []).append(event)
        return {rank: max(of.values(), key=len) for rank, of in sorted(steps.items())}

    @property
    def about(self) -> Named:
        """Facts of the first rank about its torch and its models."""
        first = self.ranks[min(self.ranks)][0]
        return next(event for event in self.of_kind("about") if event["process"] == first["process"])

    @property
    def length(self) -> int:
        """The number of steps of the first optimizer."""
        return max((number(step) for steps in self.ranks.values() for step in steps), default=0)

    @property
    def ends(self) -> int:
        """The step before which dcpbench ended it (`--saves`); 0 if it did not."""
        return max((event["k"] + 1 for event in self.of_kind("enough")), default=0)

    @property
    def broken(self) -> list[str]:
        """The errors of the recorder."""
        return [*dict.fromkeys(event["error"] for event in self.of_kind("broken"))]

    @property
    def said(self) -> str:
        """The first line of the log that names an error, of the rank that failed first if that is known, or
        its last line with a word, without a terminal's codes."""
        text = plain(self.log.read_text(errors="replace"))
        errors = [match for match in map(_ERROR.match, text.splitlines()) if match]
        found = [*(match[2] for match in errors), *[*filter(_WORD.search, text.splitlines())][-1:]]
        if first := _FAILED_FIRST.search(text):
            found = [match[2] for match in errors if match[1] == first[1]] or [
                match[2] for match in errors if not match[1] and "ChildFailedError" not in match[2]
            ]
            if int(first[2]) < 0 or not found:
                found = [": ".join([f"rank {first[1]}: {_end(int(first[2]))}", *found[:1]])]
        return clipped(_CUT.sub("not a zip archive: cut", [*found, "it printed nothing"][0]), 200)

    @property
    def failure(self) -> str:
        """The exit status and what it said, or the file of the user that it was about to change."""
        if harm := self.of_kind("harm"):
            return f"ended before it changes {harm[0]['path']}, which was there before ({harm[0]['change']})"
        return f"{_end(self.status or 0)}: {self.said}"

    @cached_property
    def disk(self) -> Disk:
        """The files that it wrote."""
        return Disk(self.events)

    @cached_property
    def state(self) -> set[Any]:
        """The digests of all weights and optimizer states of its steps."""
        parts = [step["parts"] for step in self.of_kind("step")]
        values = (value for of in parts for kind in _STATE for value in of.get(kind, {}).values())
        return {value for value in values if isinstance(value, int) and value}

    def saves(self, rank: int) -> list[Save]:
        """Return the saves of a rank."""
        return [save for save in self.disk.saves if save.process == self.ranks[rank][0]["process"]]

    def contents(self, rank: int) -> dict[tuple[int, str], Named]:
        """Return what a rank saved, by how many steps it had made and the file's path."""
        return {(save.date, save.path): save.content for save in self.saves(rank)}

    def paths_read(self) -> list[str]:
        """Return the paths that were loaded or read before the first step."""
        begins = min((steps[0]["t"] for steps in self.ranks.values()), default=float("inf"))
        reads = [event for event in self.of_kind("load", "read") if not event["k"] and event["t"] < begins]
        return [*dict.fromkeys(event["path"] for event in reads)]


def _end(status: int) -> str:
    """Say how a process ended, by its exit status or minus the number of a signal."""
    names = {of.value: of.name for of in signal.Signals}
    return f"exit status {status}" if status >= 0 else f"ended by {names.get(-status, f'signal {-status}')}"


def plain(text: str) -> str:
    """Return a text without the codes of a terminal."""
    return _CODE.sub("", text)


def number(step: Event) -> int:
    """Return the step of the first optimizer that a step is, or follows."""
    return int(step["k"]) + (not step["optimizer"])
