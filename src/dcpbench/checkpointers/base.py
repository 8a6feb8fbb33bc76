"""The contract of checkpointers, which write and read checkpoints: who calls what, on which rank, and when.

A cell makes one checkpointer on each rank, for the folder of its checkpoints:

1. `save`, on all ranks. It returns a `PendingSave` as soon as training can continue.
2. `at_success`, on each rank in the thread in which its save ends; `listing` and `size`, on each rank when
   the save has ended on all.
3. `stored` and `read_tensor`, on each rank, and `manifest`, on rank 0, to compare files with the live state.
4. `load`, on all ranks, into a run that is built from another seed; `other_ways`, on all ranks.
5. `digests`, on rank 0 at the end of each stage: the files must be those of the success.
6. `remove`, on one rank, and `close`, on each.

The usual ways to write one: DCP with other options or another storage (a YAML of `conf/save/` or
`conf/storage/`, no code); a library with its own files (`save`, `load`, `manifest`: `torch_save.py`); one
whose files cannot be read without it, which says why in `unreadable` (docs/extending.md).
"""

import asyncio
import math
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import InitVar, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist

from dcpbench.checkpointers.object_store import ObjectStore
from dcpbench.checkpointers.raw_io import RawIO
from dcpbench.compare.stored import Stored
from dcpbench.core.rank_report import Compared
from dcpbench.formats.audit import Manifest
from dcpbench.formats.files import (
    FileDigests,
    digest_files,
    digest_late_files,
    drop_pages,
    list_files,
    no_files,
)
from dcpbench.records import files
from dcpbench.state.process_state import wait_until_empty

T = TypeVar("T")


class Ranks(Protocol):
    """The ranks that write and read a checkpoint together, from the view of one of them."""

    rank: int
    size: int

    def group_of(self, slot: int) -> dist.ProcessGroup | None:
        """Return the process group for saves in this slot; None without process groups."""

    def meet(self) -> None:
        """Wait for all ranks."""


@dataclass
class PendingSave:
    """A save that training no longer waits for. Times are `time.perf_counter` seconds.

    Args:
        started: start of the save.
        released: when training could continue; without an upload, the checkpoint was complete then.
        upload: the background part of the save, if any.
        held_back: an event that `wait` sets; the upload does not end before.
        when_complete: called by `wait` after the checkpoint is complete.
    """

    started: float
    released: float
    upload: InitVar[Future[Any] | None] = None
    held_back: threading.Event | None = None
    when_complete: Callable[[], None] | None = None

    def __post_init__(self, upload: Future[Any] | None) -> None:
        self._completed: Future[float] = Future()
        if upload is None:
            self._completed.set_result(self.released)
        else:
            upload.add_done_callback(self._complete)

    def _complete(self, upload: Future[Any]) -> None:
        try:
            upload.result()
        except (CancelledError, asyncio.CancelledError) as error:
            cancelled = RuntimeError("the upload was cancelled, so the checkpoint is not complete")
            cancelled.__cause__ = error
            self._completed.set_exception(cancelled)
        except BaseException as error:  # noqa: BLE001 - raised by `wait`
            self._completed.set_exception(error)
        else:
            self._completed.set_result(time.perf_counter())

    def wait(self) -> float:
        """Wait until the checkpoint is complete; return the seconds since the start of the save.

        Raises:
            Exception: the upload raised it.
            RuntimeError: the upload was cancelled.
        """
        if self.held_back is not None:
            self.held_back.set()
        completed = self._completed.result()
        if self.when_complete is not None:
            self.when_complete()
        return completed - self.started

    def then(self, do: Callable[[], T]) -> Future[T]:
        """Call `do` as soon as the checkpoint is complete, in the thread that completes it, and return a
        future of its result. It is called immediately if the checkpoint is complete, and never if the save
        fails."""
        returned: Future[T] = Future()

        def call(completed: Future[float]) -> None:
            try:
                completed.result()
                returned.set_result(do())
            except BaseException as error:  # noqa: BLE001 - raised by `result`
                returned.set_exception(error)

        self._completed.add_done_callback(call)
        return returned

    def when_ended(self, callback: Callable[[], None]) -> None:
        """Call `callback` after the save has succeeded or failed; immediately if it already has."""
        self._completed.add_done_callback(lambda _: callback())


class AtSuccess(NamedTuple):
    """The files of a checkpoint when its save reported success on this rank: the time (`time.time`), their
    listing, and on rank 0 their digests."""

    time: float
    listing: FileDigests
    digests: FileDigests


class Checkpointer(ABC):
    """Writes and reads the checkpoints of a cell, each under a checkpoint id (a path).

    A state is a dictionary of `Stateful` objects (with `state_dict` and `load_state_dict`) and nested
    dictionaries. All ranks call `save`, `load` and `other_ways` together; any rank can call the other methods
    separately. Limits of a checkpointer are declared in its YAML (`only`), so that the driver knows them
    without importing it.
    """

    raw: RawIO | None = None
    """Writes and reads the same number of bytes in plain files; None if there is no equivalent."""

    objects: ObjectStore | None = None
    """The store, if its checkpoints are not stored in folders."""

    unreadable: str | None = None
    """The reason why `manifest` cannot return the contents of its checkpoints; None if it can."""

    has_files = True
    """False if its checkpoints are not files. Otherwise one has files when its save reports success."""

    removed: Mapping[str, str] = MappingProxyType({})
    """The name of the save that removed a checkpoint, by checkpoint id."""

    late: Mapping[str, Sequence[str]] = MappingProxyType({})
    """The files that came or changed after a save had returned on this rank, by checkpoint id."""

    kept_open: Sequence[str] = ()
    """The files below its folder that its newest load has left open."""

    left_open: Compared | None = None
    """The descriptors that two or more earlier loads have left open, although nothing uses their state any
    longer, as a comparison."""

    def name_of(self, step: int) -> str:
        """Return the path, below the folder of a cell, of the checkpoint that is saved after a step."""
        return f"step-{step:04d}"

    @abstractmethod
    def save(self, state: dict[str, Any], checkpoint_id: str, slot: int = 0) -> PendingSave:
        """Write a state; return when training can continue.

        Args:
            state: the state to save.
            checkpoint_id: a previous checkpoint there is replaced.
            slot: 0 for a save during which there is no other. Saves that are in flight at the same time have
                different slots with separate process groups, and do not end before `PendingSave.wait`.
        """

    @abstractmethod
    def load(self, state: dict[str, Any], checkpoint_id: str) -> None:
        """Fill a state from a checkpoint, in place and with `load_state_dict`.

        Raises:
            Exception, CheckpointException: the load failed; the message names a missing key.
        """

    def manifest(self, checkpoint_id: str) -> Manifest:
        """Return the contents of a complete checkpoint; of an `unreadable` one only its files.

        Raises:
            TypeError: a checkpointer of readable checkpoints does not define this.
        """
        if not self.unreadable:
            raise TypeError(f"{type(self).__name__} defines neither manifest() nor why it is `unreadable`")
        return Manifest({}, {}, self.lengths(checkpoint_id))

    def read_tensor(self, checkpoint_id: str, key: str) -> torch.Tensor | None:
        """Return a full tensor by its flattened key, on the CPU; None if there is none, or it is
        unreadable."""
        return None

    def stored(self, checkpoint_id: str) -> Stored:
        """Return how to read each tensor of a complete checkpoint without the library that wrote it; empty if
        that is not possible."""
        return {}

    def other_ways(self, checkpoint_id: str) -> Mapping[str, Callable[[dict[str, Any]], None]]:
        """Return further ways to fill a state from a checkpoint, by a phrase that describes the source."""
        return {}

    def files(self, checkpoint_id: str) -> AbstractContextManager[Path]:
        """Context manager: the folder with a checkpoint's files, or a copy if they are not stored in a
        folder."""
        return self.objects.files(checkpoint_id) if self.objects else nullcontext(Path(checkpoint_id))

    def folder(self, checkpoint_id: str) -> Path:
        """Return the folder that contains a checkpoint's files; their names are relative to it."""
        return Path(checkpoint_id)

    def stats(self, checkpoint_id: str) -> dict[Path, os.stat_result]:
        """Return the stat of each file of a checkpoint that is stored in a folder, by its path."""
        return files.files_below(self.folder(checkpoint_id))

    def lengths(self, checkpoint_id: str) -> dict[str, int]:
        """Return the length of each file of a checkpoint by its name."""
        if self.objects:
            return self.objects.lengths(checkpoint_id)
        folder, stats = self.folder(checkpoint_id), self.stats(checkpoint_id)
        return {str(path.relative_to(folder)): stat.st_size for path, stat in stats.items()}

    def digests(self, checkpoint_id: str) -> FileDigests:
        """Return digests of a checkpoint's files."""
        if self.objects:
            with self.objects.files(checkpoint_id) as copies:
                return digest_files(copies)
        return digest_files(self.folder(checkpoint_id), self.stats(checkpoint_id))

    def listing(self, checkpoint_id: str, until: float = math.inf) -> FileDigests:
        """Return the length and the mtime of each file that only this checkpoint has and that was last
        changed before a time (`time.time`), however late a shared file system made that visible."""
        if self.objects:
            return {name: f"{length} bytes" for name, length in self.lengths(checkpoint_id).items()}
        stats = {path: stat for path, stat in self.stats(checkpoint_id).items() if stat.st_ctime < until}
        return list_files(self.folder(checkpoint_id), stats)

    def at_success(self, checkpoint_id: str, rank: int, alone: bool) -> AtSuccess:
        """Describe a checkpoint's files when its save reports success on this rank. Rank 0 alone reads them;
        `alone` it needs no listing."""
        now = time.time()
        listing = {} if alone else self.listing(checkpoint_id)
        return AtSuccess(now, listing, self.digests(checkpoint_id) if rank == 0 else {})

    def without_files(self, checkpoint_id: str) -> Compared | None:
        """Return the mismatch of a checkpoint that has no files although its save reported success; None if
        they come soon, when they differ from those of then."""

        def missing() -> dict[str, None]:
            return {} if self.lengths(checkpoint_id) else {checkpoint_id: None}

        return no_files(Path(checkpoint_id).name) if wait_until_empty(missing) else None

    def digests_with_late(self, checkpoint_id: str, then: FileDigests, complete_at: float) -> FileDigests:
        """Return the digests of when a save reported success (`time.time`), completed by files that a shared
        file system made visible later."""
        folder, stats = self.folder(checkpoint_id), self.stats(checkpoint_id)
        return {**then, **digest_late_files(folder, stats, then, complete_at)}

    def note_removed(self, newest: str, names: Iterable[str] = ()) -> None:
        """Note in `removed` which checkpoints are gone after the save of the newest; `names` are those of its
        files, if an earlier stage has saved it."""
        return

    def drop_cached(self, checkpoint_id: str) -> None:
        """Drop the kernel's cached pages of a checkpoint's files."""
        drop_pages(self.stats(checkpoint_id))

    def size(self, checkpoint_id: str) -> int:
        """Return the size of a checkpoint in bytes."""
        return sum(self.lengths(checkpoint_id).values())

    def remove(self, checkpoint_id: str) -> None:
        """Remove a checkpoint; called on one rank."""
        if self.objects:
            self.objects.remove(checkpoint_id)
        else:
            files.remove_tree(Path(checkpoint_id))

    def close(self) -> None:
        """Release everything kept between saves. The checkpointer is not used afterwards."""
        return
