"""Checkpoints of a user's trainer, written by its `save(path)` and read by its `load(path)`."""

import math
import os
import threading
import time
from collections.abc import Collection, Iterable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from dcpbench.checkpointers.base import Checkpointer, PendingSave, Ranks
from dcpbench.config.schema import Config
from dcpbench.records.files import files_below, remove_tree
from dcpbench.verify.files import FileDigests, digest_files, has_only_grown, list_files

_THREADS_END_S = 1.0


class TrainerCheckpointer(Checkpointer):
    """Calls the trainer in the state to save and load. Its checkpoints are in one folder, as in a job, so
    that a file next to them that each save overwrites fails the loads. Only the trainer can read them.

    The files of a checkpoint are those under its path with any suffix (`step-2/weights`, `step-2-0.pt`), and
    those next to it that came or changed during its save (`latest`).
    """

    unreadable = "only the trainer can read its files"
    prunes = True

    def __init__(self, folder: Path, config: Config, ranks: Ranks) -> None:
        self._ranks = ranks
        self._beside: dict[str, set[str]] = {}

    def name_of(self, step: int) -> str:
        return f"output/step-{step}"

    def save(self, state: dict[str, Any], checkpoint_id: str, slot: int = 0) -> PendingSave:
        folder = self.folder(checkpoint_id)
        folder.mkdir(parents=True, exist_ok=True)
        before, threads = list_files(folder), {*threading.enumerate()}
        self._ranks.meet()  # no rank writes before every rank has listed the files
        started = time.perf_counter()
        returned = state["trainer"].save(checkpoint_id)
        upload = returned if isinstance(returned, Future) else None
        released = time.perf_counter()
        self._ranks.meet()
        pending = PendingSave(started, released if upload else time.perf_counter(), upload)
        pending.then(partial(self._note_beside, checkpoint_id, before))
        if upload is None:
            pending.when_complete = partial(_wait_for, {*threading.enumerate()} - threads)
        return pending

    def _note_beside(self, checkpoint_id: str, before: FileDigests) -> None:
        now = list_files(self.folder(checkpoint_id))
        self._beside[checkpoint_id] = {name for name, listed in now.items() if before.get(name) != listed}

    def load(self, state: dict[str, Any], checkpoint_id: str) -> None:
        state["trainer"].load(checkpoint_id)

    def folder(self, checkpoint_id: str) -> Path:
        return Path(checkpoint_id).parent

    def stats(self, checkpoint_id: str) -> dict[Path, os.stat_result]:
        folder, beside = self.folder(checkpoint_id), self._beside.get(checkpoint_id, set())
        return {
            path: stat
            for path, stat in files_below(folder).items()
            if (name := str(path.relative_to(folder))) in beside or _is_under(checkpoint_id, name)
        }

    def own(self, checkpoint_id: str, names: Iterable[str]) -> list[str]:
        """Return the names under the path of a checkpoint; all of them if none is."""
        names = [*names]
        return [name for name in names if _is_under(checkpoint_id, name)] or names

    def listing(self, checkpoint_id: str, until: float = math.inf) -> FileDigests:
        listed = super().listing(checkpoint_id, until)
        return {name: text for name, text in listed.items() if _is_under(checkpoint_id, name)}

    def digests(self, checkpoint_id: str, then: FileDigests | None = None) -> FileDigests:
        """Return digests of its files; `then` names those next to its path. One of these that has only grown
        since is a log, and counts as unchanged."""
        if then is None:
            return super().digests(checkpoint_id)
        folder = self.folder(checkpoint_id)
        names = {*self.listing(checkpoint_id), *(name for name in then if (folder / name).is_file())}
        now = {**digest_files(folder, [folder / name for name in sorted(names)])}
        for name in now:
            is_beside = not _is_under(checkpoint_id, name)
            if is_beside and now[name] != then[name] and has_only_grown(folder / name, then[name]):
                now[name] = then[name]
        return now

    def remove(self, checkpoint_id: str) -> None:
        """Remove everything under the path of a checkpoint; called on one rank."""
        for path in self.folder(checkpoint_id).iterdir():
            if not _is_under(checkpoint_id, path.name):
                continue
            if path.is_dir() and not path.is_symlink():
                remove_tree(path)
            else:
                path.unlink()


def _wait_for(threads: Collection[threading.Thread]) -> None:
    """Let threads end that a save has started and left running: files that they write are too late, which
    should be seen before a load fails on it."""
    until = time.monotonic() + _THREADS_END_S
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))


def _is_under(checkpoint_id: str, name: str) -> bool:
    """Return whether a name is that of a checkpoint's path with or without a suffix: `step-2.pt` is of
    `step-2`, `step-20.pt` is not."""
    path = Path(checkpoint_id).name
    return name.startswith(path) and not name[len(path) :][:1].isdigit()
