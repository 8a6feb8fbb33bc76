"""Runs as the recorder writes them, without a script."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dcpbench.plugins.script.compare import Stopped
from dcpbench.plugins.script.copies import Copy
from dcpbench.plugins.script.record import RecordedRun

Event = dict[str, Any]
Changes = Mapping[int, Mapping[str, Any]]


def state(step: int, **changed: Any) -> dict[str, Any]:
    """What step `step` (from 1) of the uninterrupted run depends on, except for what is `changed`."""
    values: dict[str, Any] = {
        "weights": [100 + step, 200 + step],
        "moments": [300 + step] if step > 1 else [],
        "gradients": [400 + step, 500 + step],
        "frozen": [7],
        "batch": [800 + step % 6],
        "loss": [900 + step],
        "buffers": [600 + step - 1],
        "hyper": [1.0 / step],
        "modes": [5],
    }
    return values | changed


NAMES = {
    "weights": ["a", "b"],
    "moments": ["a.exp_avg"],
    "gradients": ["a", "b"],
    "frozen": ["c"],
    "batch": ["0x"],
    "loss": ["0"],
    "buffers": ["mean"],
    "hyper": ["group 0 lr"],
    "modes": ["Net 0"],
}


class Writer:
    """Writes what a process does, in order."""

    def __init__(self, rank: int = 0) -> None:
        self.events: list[Event] = []
        self.rank, self.done, self.time = rank, 0, 0.0

    def event(self, kind: str, **fields: Any) -> None:
        self.time += 1
        self.events.append({"e": kind, "k": self.done, "t": self.time, **fields})

    def step(self, step: int, **changed: Any) -> None:
        generators = {"torch": changed.pop("torch", step)}
        values = state(step, **changed)
        parts = {kind: dict(zip(NAMES[kind], values[kind], strict=False)) for kind in values}
        if not self.done:
            self.event("about", classes=["Net"])
        self.event("step", rank=self.rank, optimizer=0, parts={**parts, "generators": generators})
        self.done += 1

    def save(self, path: str, content: Mapping[str, Any] | None = None, finished: bool = True) -> None:
        self.event("save", path=path, content=dict(content or {}))
        self.event("open", path=path)
        if finished:
            self.event("saved", path=path)

    def train(
        self, first: int, last: int, changed: Mapping[int, Mapping[str, Any]] | None = None
    ) -> "Writer":
        """Make steps, with a save after every fourth."""
        for step in range(first, last + 1):
            self.step(step, **(changed or {}).get(step, {}))
            if step % 4 == 0:
                self.save(f"step-{step}.pt", {"model.a": 101 + step, "ema.a": 10 + step, "step": f"={step}"})
        return self


def recorded(folder: Path, writers: Iterable[Writer]) -> RecordedRun:
    """Write the processes of a run, and read them."""
    folder.mkdir(parents=True)
    for number, writer in enumerate(writers):
        lines = [json.dumps(event) for event in writer.events]
        (folder / f"{number}.jsonl").write_text("\n".join([*lines, '{"e": "step", "k"', ""]))
    return RecordedRun.read(folder, folder / "log")


def run_of(writer: Writer) -> RecordedRun:
    """The run of one process, without files."""
    return RecordedRun([{**event, "process": "0"} for event in writer.events], Path("log"))


def stopped_at(frozen: RecordedRun, step: int, path: str = "", change: str = "") -> Stopped:
    """Return a run as it was before a step, or right before the change of a file, with a path that is cut."""
    cut = {"cut": "half", "path": path} if path else {}
    events = frozen.of_kind("step") if not change else frozen.of_kind("open", "rename")
    fits = (
        event for event in events if event.get("path") == change or (not change and event["k"] == step - 1)
    )
    time = next(fits)["t"] + (0 if change else 0.5)
    return Stopped(frozen.until(time), Copy(Path(), time, {"t": time, **cut}), frozen)


def runs(
    reference: RecordedRun, second: RecordedRun | None = None
) -> tuple[Callable[[], RecordedRun], Callable[[], RecordedRun]]:
    """Return the further runs of a verdict."""
    return lambda: second or pytest.fail("a second resume was made"), lambda: reference


def ended(run: RecordedRun, status: int | None = 0, text: str = "") -> RecordedRun:
    """A run that ended with this status and output."""
    run.log.write_text(text)
    return replace(run, status=status)
