"""The contract of everything that writes and reads checkpoints."""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import InitVar, dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from dcpbench.checkpointers.raw_io import RawIO
from dcpbench.records import files
from dcpbench.verify.audit import Manifest
from dcpbench.verify.files import FileDigests, digest_files, digest_late_files, drop_pages
from dcpbench.verify.plain_read import Stored

T = TypeVar("T")


class Ranks(Protocol):
    """The ranks among which a checkpoint is written and read, as one of them sees it."""

    rank: int
    size: int

    def group_of(self, slot: int) -> dist.ProcessGroup | None:
        """The process group for a save in this slot; None where there is no process group."""

    def meet(self) -> None:
        """Wait until every rank is here."""


@dataclass
class PendingSave:
    """A save that training no longer waits for; times are `time.perf_counter` seconds.

    Args:
        started: when the save began.
        released: when training could go on; without an upload the checkpoint is complete by then.
        upload: what goes on in the background, if anything does.
        held_back: set by `wait`, for an upload that must not end before.
        when_complete: called by `wait` once the checkpoint is complete.
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
        if error := upload.exception():
            self._completed.set_exception(error)
        else:
            self._completed.set_result(time.perf_counter())

    def wait(self) -> float:
        """Let it go on until the checkpoint is complete; seconds from the start of the save until then.

        Raises:
            Exception: whatever the upload raised.
        """
        if self.held_back is not None:
            self.held_back.set()
        completed = self._completed.result()
        if self.when_complete is not None:
            self.when_complete()
        return completed - self.started

    def then(self, do: Callable[[], T]) -> Future[T]:
        """What `do` returns; it is called the moment the checkpoint is complete, in the thread in which that
        happens: at once if it is already, never if the save fails."""
        returned: Future[T] = Future()

        def call(completed: Future[float]) -> None:
            try:
                completed.result()
                returned.set_result(do())
            except BaseException as error:  # noqa: BLE001 - it is raised where the result is asked for
                returned.set_exception(error)

        self._completed.add_done_callback(call)
        return returned

    def when_ended(self, callback: Callable[[], None]) -> None:
        """Call `callback` once the save has ended, well or not; at once if it has already."""
        self._completed.add_done_callback(lambda _: callback())


class Checkpointer(ABC):
    """Writes and reads the checkpoints of a cell, each in a place of its own, its checkpoint id (a path).

    A state is a dictionary of `Stateful` objects (they have `state_dict` and `load_state_dict`) and nested
    dictionaries. All ranks save and load together; what else is asked any rank may ask, by itself. What a
    checkpointer cannot do its YAML declares (`only`), so that the driver knows it without importing it.
    """

    raw: RawIO | None = None
    """How to do with plain files what a save and a load do, where there is a way."""

    unreadable: str | None = None
    """Why nobody else can tell what its checkpoints hold; None where `manifest` does."""

    @abstractmethod
    def save(self, state: dict[str, Any], checkpoint_id: str, slot: int = 0) -> PendingSave:
        """Write a state; returns once training may go on.

        Args:
            state: what is saved.
            checkpoint_id: the place; what it holds is replaced.
            slot: 0 for a save that no other goes on beside. Saves that are under way at once have other
                slots, each a process group of its own, and none of them ends before it is waited for.
        """

    @abstractmethod
    def load(self, state: dict[str, Any], checkpoint_id: str) -> None:
        """Fill a state with what a checkpoint holds of it: in place, and through `load_state_dict`.

        Raises:
            Exception, CheckpointException: naming a key that it lacks, or whatever else went wrong.
        """

    @abstractmethod
    def manifest(self, checkpoint_id: str) -> Manifest:
        """What a complete checkpoint says of itself."""

    @abstractmethod
    def read_tensor(self, checkpoint_id: str, key: str) -> torch.Tensor | None:
        """A whole tensor by its flattened key, on the CPU; None if there is none."""

    def stored(self, checkpoint_id: str) -> Stored:
        """How to read each tensor from a complete checkpoint's files without what wrote them; empty where
        there is no such way."""
        return {}

    def other_ways(self, checkpoint_id: str) -> Mapping[str, Callable[[dict[str, Any]], None]]:
        """Ways beside `load` to fill a state with what a checkpoint holds, by what is read; all ranks
        together."""
        return {}

    def files(self, checkpoint_id: str) -> AbstractContextManager[Path]:
        """Within, the folder that has a checkpoint's files, or a copy of it where they lie elsewhere."""
        return nullcontext(Path(checkpoint_id))

    def put_back(self, checkpoint_id: str, folder: Path) -> None:
        """Have what lies in the folder of `files`, that is still open, be the checkpoint: of a copy only is
        there anything to do."""
        return

    def digests(self, checkpoint_id: str) -> FileDigests:
        """What a checkpoint's files are now; nothing where there are none."""
        with self.files(checkpoint_id) as folder:
            return digest_files(folder)

    def digests_with_late(self, checkpoint_id: str, then: FileDigests, complete_at: float) -> FileDigests:
        """What `digests` said when a save reported success (`time.time`), with the files that a shared file
        system has shown late."""
        return {**then, **digest_late_files(Path(checkpoint_id), then, complete_at)}

    def drop_cached(self, checkpoint_id: str) -> None:
        """Drop what the kernel has cached of the files of a checkpoint."""
        drop_pages(Path(checkpoint_id))

    def size(self, checkpoint_id: str) -> int:
        """The bytes that a checkpoint takes up."""
        return sum(file_lengths(checkpoint_id).values())

    def remove(self, checkpoint_id: str) -> None:
        """Remove a checkpoint; one rank does."""
        files.remove_tree(Path(checkpoint_id))

    def close(self) -> None:
        """Give back what is kept from one save to the next; nothing is asked of it any more."""
        return


def file_lengths(checkpoint_id: str) -> dict[str, int]:
    """The bytes of each file below a folder by its relative path."""
    root = Path(checkpoint_id)
    return {str(path.relative_to(root)): found.st_size for path, found in files.files_below(root).items()}
