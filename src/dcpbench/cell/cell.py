"""One cell on one rank, and what a scenario may do with it, in which order.

A scenario is a function, or a list of stages, that every rank of the cell calls with its `Cell`:

1. `uninterrupted.train_unsaved(cell)` trains the run that never saves, and judges its training by a twin.
2. `uninterrupted.save_reference(cell, unsaved)` trains the reference run again and saves it, `saves` times;
   each save is compared with the live state, and its files are noted when it reports success.
3. For each checkpoint, the newest first: `steps.build_target` builds a run from another seed;
   `checks.load_and_verify` loads and compares; `checks.resume` trains on and compares losses and state.
4. `checks.verify_saved_again` saves a resumed run and loads that checkpoint.
5. After the last stage the caller compares the files of all checkpoints with those of their success.

Steps 2 to 4 are collective: all ranks call them in the same order. `phase` times a part, also of a scenario's
own; `record` takes a comparison with its control, on each rank; `measure` a number; `leave_out` says why a
check does not apply. A rank that raises ends the cell as an error; `Skip` ends it as a skip. What loads in a
new process gets the `ReferenceRun` of the stage before by files (`handover`).

The usual ways to write one: call the steps in another order (`scenarios/chain.py`) or with another
configuration (`cell.vary`, `scenarios/fine_tune.py`), or call DCP and record what it does
(`scenarios/dcp_api/`).
"""

import inspect
import multiprocessing
import pkgutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

from dcpbench.checkpointers.base import Checkpointer, PendingSave
from dcpbench.config.schema import Config
from dcpbench.core.metrics import METRICS, PHASE_S, Measurement
from dcpbench.core.mismatch import Place, Sides
from dcpbench.core.plugins import hooks
from dcpbench.core.rank_report import CheckReport, Compared, RankReport
from dcpbench.runs.run import Run
from dcpbench.state.snapshot import State
from dcpbench.workloads.workload import Batches, batches_of
from dcpbench.workloads.world import World


class Uploads:
    """The saves in flight. `notify` gets the start of each (`time.monotonic`) whenever one starts or ends, so
    that a death or a hang in the background is reported as such."""

    def __init__(self, notify: Callable[[tuple[float, ...]], None]) -> None:
        self._notify = notify
        self._started: list[float] = []
        self._lock = threading.Lock()

    def follow(self, pending: PendingSave) -> None:
        """Count a save as in flight until it succeeds or fails."""
        started = time.monotonic()
        self._change(self._started.append, started)
        pending.when_ended(lambda: self._change(self._started.remove, started))

    def _change(self, change: Callable[[float], None], started: float) -> None:
        with self._lock:
            change(started)
            self._notify(tuple(self._started))


class KnownFiles(NamedTuple):
    """The files of a checkpoint, which must stay as they are.

    Args:
        where: the place of the checkpoint.
        digests: those of when its save reported success; None if its trainer has removed it since.
        checkpointer: reads them.
    """

    where: Place
    digests: Mapping[str, str] | None
    checkpointer: Checkpointer


@dataclass(frozen=True)
class Window:
    """The steps of a cell.

    >>> Window((2, 4), 3, 6).end_of(4)
    6

    Args:
        saves: the steps after which a checkpoint is written, in order.
        resume_steps: the most steps that a resumed run takes.
        last: the last step of the uninterrupted run.
    """

    saves: tuple[int, ...]
    resume_steps: int
    last: int

    @classmethod
    def of(cls, config: Config) -> "Window":
        """Return the steps that a configuration asks for."""
        return cls(tuple(config.save_steps), config.steps_after_load, config.last_step)

    def end_of(self, step: int) -> int:
        """Return the last step of a run that is resumed after a step."""
        return min(step + self.resume_steps, self.last)

    @property
    def ends(self) -> frozenset[int]:
        """The steps at which resumed runs end."""
        return frozenset(map(self.end_of, self.saves))


@dataclass(frozen=True)
class Cell:
    """One stage of a cell on one rank, which every scenario gets as its first argument.

    Args:
        config: the configuration of the cell.
        world: the ranks of this stage.
        folder: where checkpoints go.
        announce: notifies the driver that a phase begins, so that it can report a failure with its phase; a
            second text is shown to the user.
        report: what this rank hands to the driver at the end.
        uploads: the saves in flight.
        name: of the run of the cell.
        files: of each checkpoint, by its id, oldest first.
        saved: the live runs that were saved, by checkpoint id; no load may change them.
        ended: a copy of the state that they had after their last step, by checkpoint id.
        unrestored: a copy of the state that a load target had before a load, by checkpoint id, if a known
            defect of torch may leave some of it.
        unexplained: places of checkpoints in whose last load no known defect can have made anything wrong.
        synced: returns the files below a folder that this rank has synced.
        endings: callbacks for the end of the stage.
        children_before: child processes that this rank had before the cell.
        trainer_steps: the steps of a trainer, which the run that never saves has chosen.
        trained_packages: those that define the forwards of the modules that this stage has trained; not of
            twins.
    """

    config: Config
    world: World
    folder: Path
    announce: Callable[..., None]
    report: RankReport
    uploads: Uploads
    name: str = ""
    files: dict[str, KnownFiles] = field(default_factory=dict)
    saved: dict[str, Run] = field(default_factory=dict)
    ended: dict[str, State] = field(default_factory=dict)
    unrestored: dict[str, State] = field(default_factory=dict)
    unexplained: set[Place] = field(default_factory=set)
    synced: Callable[[Path], set[str]] = lambda folder: set()
    endings: ExitStack = field(default_factory=ExitStack)
    children_before: set[BaseProcess] = field(default_factory=lambda: set(multiprocessing.active_children()))
    trained_packages: set[str] = field(default_factory=set)
    trainer_steps: Window | None = None

    @property
    def window(self) -> Window:
        """The steps after which it saves, and how far its runs train."""
        return self.trainer_steps or Window.of(self.config)

    @cached_property
    def batches(self) -> Batches:
        """The batches that are trained on."""
        return batches_of(self.config, self.world.device)

    @cached_property
    def checkpointer(self) -> Checkpointer:
        """Its checkpointer, which is closed at the end of the stage."""
        made: Checkpointer = pkgutil.resolve_name(self.config.checkpointer.target)(
            self.folder, self.config, self.world
        )
        self.endings.callback(made.close)
        for hook in hooks("checkpointer"):
            hook(self, made)
        return made

    def vary(self, folder: str | None = None, **values: Any) -> "Cell":
        """Return the cell with some configuration values replaced, its checkpoints in a subfolder, and a
        checkpointer for these. Both fill in the same report."""
        return replace(self, config=replace(self.config, **values), folder=self.folder / (folder or ""))

    @contextmanager
    def phase(self, name: str, section: str | None = None) -> Iterator[None]:
        """Context manager: announce a phase and measure its time, including work on the device. Metrics of
        the phase are probed at its end. `section` names a part of a phase."""
        full_name = f"{name}/{section}" if section else name
        self.announce(name)
        self.world.synchronize()
        started = time.perf_counter()
        yield
        self.world.synchronize()
        self.measure(PHASE_S, time.perf_counter() - started, phase=full_name)
        for spec in METRICS.values():
            if spec.probe and spec.phase in (name, full_name):
                self.measure(spec.name, spec.probe(self), phase=full_name)

    @contextmanager
    def training(self, run: Run) -> Iterator[None]:
        """Context manager: the phase in which a run trains; a failure is reported with the save or load that
        the run comes after."""
        self.report.during = run.comes_after
        for module in run.model.modules():
            forward = inspect.getattr_static(type(module), "forward")
            self.trained_packages.add(str(getattr(forward, "__module__", None)).partition(".")[0])
        with self.phase("train"):
            try:
                yield
            except Exception:
                if self.config.own_trainer:
                    how = f", in step {run.train_state.step + 1}"
                    self.report.during = run.comes_after._replace(how=how)
                raise

    def measure(
        self, metric: str, value: float | None, save: int | None = None, phase: str | None = None
    ) -> None:
        """Record a measurement, in the unit of the metric.

        Args:
            value: None if it could not be measured; then nothing is recorded.
            save: the number of the save or load, from 0.
        """
        if value is not None:
            self.report.measurements.append(Measurement(metric, value, self.world.rank, phase, save))

    def times_measured(self, metric: str) -> int:
        """Return how often this rank has measured a metric, which is the number of the next save or load."""
        return [measurement.metric for measurement in self.report.measurements].count(metric)

    def record(self, check: str, compared: Compared, where: Place | str, sides: Sides | None = None) -> None:
        """Record a comparison and its negative control.

        Args:
            check: one of `CHECKS`.
            compared: empty on a rank that has nothing to compare.
            where: the place, such as `checkpoint.place`; a scenario's own phrase is one, too.
            sides: what was compared, for people; by default the saved and the restored state.
        """
        place = where if isinstance(where, Place) else Place(where)
        self.report.checks.setdefault(check, CheckReport()).record(compared, place, sides)

    def leave_out(self, checks: Iterable[str], why: str, where: Place | None = None) -> None:
        """Report why checks are not made, at one place such as a checkpoint or at all."""
        for check in checks:
            self.report.note("left_out", why, check, place=where)

    def proven(self, check: str) -> set[str]:
        """Return the names whose negative control this rank has already seen reported in a check. The control
        of a copy costs as much as its comparison: in a cell one of each name is enough for all comparisons
        of copies."""
        controls = self.report.checks.get(check, CheckReport()).control.values()
        return {name for of_place in controls for name, detected in of_place.items() if detected}
