"""Checkpoints of a user's trainer, written by its `save(path)` and read by its `load(path)`."""

import gc
import os
import threading
import time
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from dcpbench.checkpointers.base import AtSuccess, Checkpointer, PendingSave, Ranks
from dcpbench.config.schema import Config
from dcpbench.core.mismatch import Mismatch, Problem
from dcpbench.core.rank_report import Compared
from dcpbench.records.files import files_below, remove_tree
from dcpbench.state.process_state import open_descriptors

_THREADS_END_S = 1.0


class TrainerCheckpointer(Checkpointer):
    """Calls the trainer in the state to save and load. Its checkpoints are in one folder, as in a job. The
    files of one are those under its path with any suffix (`step-2/weights`, `step-2-0.pt`), or, if there are
    none, those that its save alone has written in the folder. Other files there belong to none. Only the
    trainer can read them, and it may remove them.

    Attributes:
        removed: the path of the save after which all files of a checkpoint were gone, by checkpoint id.
        late: files that came or changed after `save` had returned on this rank, by checkpoint id.
    """

    unreadable = "only the trainer can read its files"

    def __init__(self, folder: Path, config: Config, ranks: Ranks) -> None:
        self._ranks = ranks
        self._with_files: set[str] = set()
        self._before: dict[str, dict[Path, int]] = {}
        self._saves: dict[Path, str | None] = {}
        self._opened: list[dict[int, str]] = []
        self.removed: dict[str, str] = {}
        self.late: dict[str, list[str]] = {}

    def name_of(self, step: int) -> str:
        return f"output/step-{step}"

    def save(self, state: dict[str, Any], checkpoint_id: str, slot: int = 0) -> PendingSave:
        self.folder(checkpoint_id).mkdir(parents=True, exist_ok=True)
        self._before[checkpoint_id] = self._times(checkpoint_id)
        threads = {*threading.enumerate()}
        self._ranks.meet()
        started = time.perf_counter()
        returned = state["trainer"].save(checkpoint_id)
        upload = returned if isinstance(returned, Future) else None
        released = time.perf_counter()
        self._note_written(checkpoint_id)
        listed = self.listing(checkpoint_id)
        self._ranks.meet()
        self._note_written(checkpoint_id)
        pending = PendingSave(started, released if upload else time.perf_counter(), upload)
        if upload is None:
            now = self.listing(checkpoint_id)
            self.late[checkpoint_id] = sorted(name for name in now if now[name] != listed.get(name))
            pending.when_complete = partial(_wait_for, {*threading.enumerate()} - threads)
        self.note_removed(checkpoint_id)
        return pending

    def at_success(self, checkpoint_id: str, rank: int, alone: bool) -> AtSuccess:
        self._note_written(checkpoint_id)
        return super().at_success(checkpoint_id, rank, alone)

    def _times(self, checkpoint_id: str) -> dict[Path, int]:
        return {path: stat.st_ctime_ns for path, stat in files_below(self.folder(checkpoint_id)).items()}

    def _note_written(self, checkpoint_id: str) -> None:
        """Note the save of each file; none of those that several have written, such as a log."""
        before = self._before[checkpoint_id]
        for path, at in self._times(checkpoint_id).items():
            if before.get(path) != at and self._saves.setdefault(path, checkpoint_id) != checkpoint_id:
                self._saves[path] = None

    def note_removed(self, newest: str, names: Iterable[str] = ()) -> None:
        """Note the checkpoints that had files and have none after the save of the newest."""
        self._saves |= dict.fromkeys((self.folder(newest) / name for name in names), newest)
        for checkpoint_id in {*self._with_files, newest} - self.removed.keys():
            if self.stats(checkpoint_id):
                self._with_files.add(checkpoint_id)
            elif checkpoint_id in self._with_files:
                self.removed[checkpoint_id] = Path(newest).name

    def load(self, state: dict[str, Any], checkpoint_id: str) -> None:
        gc.collect()  # the trainers of earlier loads
        before = open_descriptors()
        if len(self._opened) > 1:
            always = dict([*before.items()][:1])
            mismatches, control = (_adding_up(opened, before) for opened in (self._opened, [always, always]))
            self.left_open = Compared.of(mismatches, control, ["process.descriptors"])
        state["trainer"].load(checkpoint_id)
        gc.collect()
        now = open_descriptors().items()
        self._opened.append({number: name for number, name in now if before.get(number) != name})
        folder = str(self.folder(checkpoint_id).resolve())
        self.kept_open = [Path(name).name for name in self._opened[-1].values() if name.startswith(folder)]

    def folder(self, checkpoint_id: str) -> Path:
        return Path(checkpoint_id).parent

    def stats(self, checkpoint_id: str) -> dict[Path, os.stat_result]:
        folder = self.folder(checkpoint_id)
        files = files_below(folder)
        under = [path for path in files if is_under(checkpoint_id, str(path.relative_to(folder)))]
        of_save = under or [path for path in files if self._saves.get(path) == checkpoint_id]
        return {path: files[path] for path in of_save}

    def remove(self, checkpoint_id: str) -> None:
        """Remove everything under the path of a checkpoint; called on one rank."""
        for path in self.folder(checkpoint_id).iterdir():
            if not is_under(checkpoint_id, path.name):
                continue
            if path.is_dir() and not path.is_symlink():
                remove_tree(path)
            else:
                path.unlink()
        for path in self.stats(checkpoint_id):
            path.unlink()


def _adding_up(opened: Iterable[Mapping[int, str]], now: Mapping[int, str]) -> list[Mismatch]:
    """Return a mismatch if each of several loads has opened something that is open now."""
    left = [[name for number, name in of_load.items() if now.get(number) == name] for of_load in opened]
    names = [of_load[0] for of_load in left if of_load]
    if len(names) < 2:
        return []
    facts = {"expected": "no descriptor", "actual": f"those of {len(names)} loads, such as {names[-1]}"}
    sides = ("{} left open by earlier loads", "{}")
    return [Mismatch("process.descriptors", Problem.value, facts=facts, sides=sides)]


def _wait_for(threads: Collection[threading.Thread]) -> None:
    """Let threads end that a save has started and left running: files that they write are too late, which
    should be seen before a load fails on it."""
    until = time.monotonic() + _THREADS_END_S
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))


def is_under(checkpoint_id: str, name: str) -> bool:
    """Return whether a name is that of a checkpoint's path with or without a suffix: `step-2.pt` is of
    `step-2`, `step-20.pt` is not."""
    path = Path(checkpoint_id).name
    return name.startswith(path) and not name[len(path) :][:1].isdigit()
