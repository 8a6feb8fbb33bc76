"""How a checkpoint is written: one function for each way, and what they hand back.

Each takes the state dict, the checkpoint id, the storage writer and the process group to coordinate
in, and returns once training may go on.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import StorageWriter
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse


@dataclass
class PendingSave:
    """A save that training no longer waits for; times are `time.perf_counter` seconds."""

    started: float
    released: float
    completed: float = 0.0
    held_back: threading.Event | None = None
    """Set, it lets go on an upload that was held back."""
    _upload: Future[Any] | None = None
    _told: threading.Event = field(default_factory=threading.Event)

    @property
    def stall_s(self) -> float:
        """How long training stood still."""
        return self.released - self.started

    def wait(self) -> float:
        """Let it go on and wait until the checkpoint is complete; seconds from the start of the save until
        then.

        Raises:
            Exception: whatever the upload raised.
        """
        if self.held_back is not None:
            self.held_back.set()
        if self._upload is not None:
            self._upload.result()
            self._told.wait()  # a future's result may be had before its callbacks have run
        return self.completed - self.started

    def when_ended(self, callback: Callable[[], None]) -> None:
        """Call `callback` once the save has ended, well or not; at once if it has already."""
        if self._upload is None:
            callback()
        else:
            self._upload.add_done_callback(lambda _: callback())

    def _complete(self, _: Future[Any]) -> None:
        self.completed = time.perf_counter()
        self._told.set()


def hold_back(writer: StorageWriter) -> threading.Event:
    """Have a writer write no data until the event is set: its save is certain to be under way until then."""
    go_on = threading.Event()
    write_data = type(writer).write_data

    def wait_and_write(*arguments: Any) -> Any:
        go_on.wait()
        return write_data(writer, *arguments)

    vars(writer)["write_data"] = wait_and_write
    return go_on


def sync(
    state_dict: dict[str, Any],
    checkpoint_id: str,
    writer: StorageWriter,
    process_group: dist.ProcessGroup | None,
) -> PendingSave:
    """`dcp.save`: when it returns, the checkpoint is complete."""
    started = time.perf_counter()
    dcp.save(
        state_dict,
        checkpoint_id=checkpoint_id,
        storage_writer=writer,
        process_group=process_group,
    )
    ended = time.perf_counter()
    return PendingSave(started, ended, completed=ended)


def asynchronous(
    state_dict: dict[str, Any],
    checkpoint_id: str,
    writer: StorageWriter,
    process_group: dist.ProcessGroup | None,
) -> PendingSave:
    """`dcp.async_save`: it returns once the state is staged, the upload goes on in a thread.

    `process_group` must be a group of its own with a CPU backend: the upload's collectives run beside
    the training's, and on a shared group the ranks would pair them up differently.
    """
    started = time.perf_counter()
    response = dcp.async_save(
        state_dict,
        checkpoint_id=checkpoint_id,
        storage_writer=writer,
        process_group=process_group,
    )
    if isinstance(response, AsyncSaveResponse):
        # Where staging is asynchronous too, the state must not change before it is staged.
        response.staging_completion.result()
        upload = response.upload_completion
    else:
        upload = response
    pending = PendingSave(started, time.perf_counter(), _upload=upload)
    upload.add_done_callback(pending._complete)
    return pending
