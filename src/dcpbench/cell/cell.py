"""A cell as its scenario sees it: the configuration, this rank's world, timed phases, a report."""

import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from dcpbench.cell.checkpoint import SavedCheckpoint
from dcpbench.checkpointers.base import PendingSave
from dcpbench.config.schema import Config
from dcpbench.core.metrics import METRICS, PHASE_S, Measurement
from dcpbench.core.rank_report import CheckReport, Compared, RankReport
from dcpbench.workloads.world import World

Digests = Mapping[str, str]
"""What can be told of the bytes of a checkpoint's files, by their paths in it."""


class Uploads:
    """The saves that go on beside training; `tell` has the start of each (`time.monotonic`) whenever one
    begins or ends, so that a death or a hang in the background is reported as such."""

    def __init__(self, tell: Callable[[tuple[float, ...]], None]) -> None:
        self._tell = tell
        self._since: list[float] = []
        self._changing = threading.Lock()

    def follow(self, pending: PendingSave) -> None:
        """From now on until it ends, well or not, a save is under way."""
        began = time.monotonic()
        self._change(self._since.append, began)
        pending.when_ended(lambda: self._change(self._since.remove, began))

    def _change(self, change: Callable[[float], None], began: float) -> None:
        with self._changing:
            change(began)
            self._tell(tuple(self._since))


@dataclass(frozen=True)
class Cell:
    """What a stage of a scenario works with on one rank: checkpoints go to `folder`; `announce` tells the
    driver which phase begins, so that a failure is reported with its phase, `uploads` what goes on beside."""

    config: Config
    world: World
    folder: Path
    announce: Callable[[str], None]
    report: RankReport
    uploads: Uploads
    files: dict[str, tuple[str, Mapping[str, str], Callable[[], Mapping[str, str]]]] = field(
        default_factory=dict
    )
    """Of each checkpoint by its id: how it is called, what its files were when it was complete, and what says
    what they are now."""
    complete: list[SavedCheckpoint] = field(default_factory=list)
    """The newest checkpoint that is complete, once there is one."""
    synced: Callable[[Path], set[str]] = lambda folder: set()
    """Says which files below a folder this rank has synced."""
    endings: ExitStack = field(default_factory=ExitStack)
    """What has to be given back when the stage ends."""
    children_before: set[BaseProcess] = field(default_factory=lambda: set(multiprocessing.active_children()))
    """The processes that this rank had started before the cell."""

    def vary(self, folder: str | None = None, **parts: Any) -> "Cell":
        """The same cell, its report too, with parts of its configuration replaced, and its checkpoints in a
        folder below its own."""
        return replace(self, config=replace(self.config, **parts), folder=self.folder / (folder or ""))

    @contextmanager
    def phase(self, name: str, part: str | None = None) -> Iterator[None]:
        """Announce a phase, measure the time spent in it, device work included, and then what else is
        measured in it; `part` is what of the phase this is."""
        full_name = f"{name}/{part}" if part else name
        self.announce(name)
        self.world.synchronize()
        started = time.perf_counter()
        yield
        self.world.synchronize()
        self.measure(PHASE_S, time.perf_counter() - started, phase=full_name)
        for spec in METRICS.values():
            if spec.probe and spec.phase in (name, full_name):
                self.measure(spec.name, spec.probe(self), phase=full_name)

    def measure(
        self, metric: str, value: float | None, save: int | None = None, phase: str | None = None
    ) -> None:
        """Record a value of a metric in its unit, of the save, or load, of this number, from 0; None is one
        that could not be measured."""
        if value is not None:
            self.report.measurements.append(Measurement(metric, value, self.world.rank, phase, save))

    def measured(self, metric: str) -> int:
        """How many values of a metric this rank has recorded: the number of the next save, or load."""
        return sum(one.metric == metric for one in self.report.measurements)

    def record(self, check: str, compared: Compared, where: str) -> None:
        """Record the result of a comparison with its negative control; `where` names the checkpoint or the
        moment. A rank that has nothing to compare there records an empty one."""
        self.report.checks.setdefault(check, CheckReport()).record(compared, where)
