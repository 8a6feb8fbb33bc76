"""A cell as its scenario sees it: the configuration, this rank's world, timed phases, a report."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dcpbench.checkpointers.saving import PendingSave
from dcpbench.config.schema import Config, Plan
from dcpbench.records.verdict import CheckReport, RankReport
from dcpbench.verify.compare import Mismatch
from dcpbench.workloads.world import World


class Skip(Exception):  # noqa: N818 - it is no error
    """This torch or this machine cannot do what the cell is about, which only a rank can find out."""


class Uploads:
    """The saves that go on beside training; `tell` has the start of each (`time.monotonic`) whenever one
    begins or ends, so that a death or a hang in the background can be told as such."""

    def __init__(self, tell: Callable[[tuple[float, ...]], None]) -> None:
        self._tell = tell
        self._since: list[float] = []
        self._changing = threading.Lock()

    def follow(self, pending: PendingSave) -> None:
        """From now on until it ends, well or not, a save is under way."""
        began = time.monotonic()
        with self._changing:
            self._since.append(began)
            self._tell(tuple(self._since))
        pending.when_ended(lambda: self._ended(began))

    def _ended(self, began: float) -> None:
        with self._changing:
            self._since.remove(began)
            self._tell(tuple(self._since))


@dataclass(frozen=True)
class Cell:
    """What a scenario works with on one rank.

    `folder` is where checkpoints go; `announce` tells the driver which phase begins, so that a
    failure, a death or a time-out can be told with its phase. `uploads` does for the background.
    """

    config: Config
    world: World
    folder: Path
    announce: Callable[[str], None]
    report: RankReport
    uploads: Uploads
    memory: dict[str, Any] = field(default_factory=dict)
    """What steps remember of a cell, shared by its variants: its first save, for faults that repeat it."""

    def vary(self, folder: str | None = None, **parts: Any) -> "Cell":
        """The same cell with parts of its configuration replaced, and its checkpoints in a folder of
        their own below its own; all variants fill in one report."""
        below = self.folder / folder if folder else self.folder
        return replace(self, config=replace(self.config, **parts), folder=below)

    @property
    def plan(self) -> Plan:
        """When to save and how far to go."""
        config = self.config
        return Plan(config.train_steps, config.saves, config.resume_steps, config.save_at)

    @contextmanager
    def phase(self, name: str, part: str | None = None) -> Iterator[None]:
        """Announce a phase and add the time spent in it, device work included, to the report; `part` is
        what of the phase this is, if that is told apart."""
        self.announce(name)
        self.world.synchronize()
        started = time.perf_counter()
        yield
        self.world.synchronize()
        spent = time.perf_counter() - started
        self.report.phases[name] = self.report.phases.get(name, 0.0) + spent
        if part:
            self.report.parts[part] = self.report.parts.get(part, 0.0) + spent

    def check(self, name: str, mismatches: Iterable[Mismatch], where: str = "") -> None:
        """Record what a comparison found; `where` says at which checkpoint."""
        view = self._view(name)
        for found in mismatches:
            sentence = " ".join(f"{found} {where}".split())
            view.add(found.name, f"{sentence}: {found.what}", where=where, **found.plain())

    def control(self, name: str, fired: dict[str, bool], where: str = "") -> None:
        """Record for each name whether the negative control of a check was reported as different."""
        view = self._view(name)
        view.control.update({f"{key} {where}".strip(): value for key, value in fired.items()})

    def _view(self, name: str) -> CheckReport:
        return self.report.checks.setdefault(name, CheckReport())
