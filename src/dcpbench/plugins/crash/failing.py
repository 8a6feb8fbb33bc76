"""A failing storage: DCP's FileSystemWriter and FileSystemReader over a file layer in which one operation
fails, or all after it too.

The options specify the operation. Operations are counted from the start in each save and each load on each
rank. A rank on which one fails creates a mark next to the checkpoint.
"""

import errno
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from fnmatch import fnmatch
from functools import partial
from pathlib import Path, PurePath
from typing import Any, ClassVar

import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from dcpbench.checkpointers.storage import Storage, file
from dcpbench.config.groups import SaveConfig, StorageConfig, rank_of
from dcpbench.formats.dcp_metadata import DATA_SUFFIX
from dcpbench.plugins.crash.file_layer import FileLayer, layered
from dcpbench.plugins.crash.operations import Kind

_WAIT_S = 5.0


class Failure(StrEnum):
    """The way in which an operation fails."""

    enospc = "enospc"  # no space left on device, from this operation on
    eio = "eio"  # an error of the device
    short = "short"  # half of the bytes are written or read, and the call returns that
    eof = "eof"  # the file ends at this point
    flipped = "flipped"  # one bit in the middle of the opened file is wrong
    missing = "missing"  # the opened file does not exist
    other_save = "other_save"  # the file of another checkpoint is opened instead
    slow = "slow"  # this operation and later ones are limited to `bytes_per_s`


@dataclass(frozen=True)
class Failing:
    """The operation that fails, and the way in which it does.

    Args:
        failure: the way in which it fails.
        of: `save` or `load`.
        operation: the kind that fails: open, write, fsync, rename, unlink, mkdir; in a load open or read.
        nth: number of the operation of this kind, from 1.
        files: pattern of the names of files whose operations count.
        rank: rank on which it fails, -1 is the last; null: every rank.
        thread: `caller`, in which DCP calls the writer, a `writer` thread started by it, or `any`.
        bytes_per_s: speed of a slow device.
    """

    failure: Failure
    of: str = "save"
    operation: Kind = Kind.write
    nth: int = 1
    files: str = "*"
    rank: int | None = None
    thread: str = "any"
    bytes_per_s: float = 1e6

    def __post_init__(self) -> None:
        of_file = self.failure in (Failure.flipped, Failure.missing, Failure.other_save)
        if of_file and (self.of, self.operation) != ("load", Kind.open):
            raise ValueError(
                f"failure={self.failure}: applies only to files that are read; set of=load operation=open"
            )

    def layer(self, checkpoint: Any, of: str) -> FileLayer:
        """Return the file layer of a save or a load on this rank."""
        rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        if of != self.of or (self.rank is not None and rank != rank_of(self.rank, size)):
            return FileLayer(Path(checkpoint))
        return _FailingLayer(self, Path(checkpoint), rank)


_OWN = frozenset(option.name for option in fields(Failing))


def has_failed(checkpoint: Path) -> bool:
    """Return whether an operation has failed on a rank in a save or a load of a checkpoint."""
    return any(checkpoint.parent.glob(f"{checkpoint.name}.failed-*"))


def sound_storage(config: StorageConfig) -> StorageConfig:
    """Return the configuration of the same storage without failures."""
    options = {name: option for name, option in config.options.items() if name not in _OWN}
    return replace(config, target=f"{file.__module__}.{file.__name__}", options=options)


class _FailingLayer(FileLayer):
    """The file layer of one save or load on one rank."""

    reads = True
    _LASTS: ClassVar = {Failure.enospc, Failure.slow}

    def __init__(self, failing: Failing, checkpoint: Path, rank: int) -> None:
        super().__init__(checkpoint)
        self._failing = failing
        self._mark = checkpoint.with_name(f"{checkpoint.name}.failed-{rank}")
        self._caller = threading.get_ident()
        self._came = {thread: threading.Event() for thread in ("caller", "writer")}
        self._ended, self._of_other_save = set[str](), set[str]()
        self._flipped: dict[str, int] = {}

    def begin(self, kind: Kind, path: str, size: int = 0) -> int:
        failing = self._failing
        if path in self._ended:
            return 0
        if not self._fails(kind, path):
            return size
        self._mark.touch()
        match failing.failure:
            case Failure.enospc | Failure.eio:
                number = getattr(errno, failing.failure.upper())
                raise OSError(number, os.strerror(number), path)
            case Failure.missing:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            case Failure.short:
                return (size + 1) // 2
            case Failure.eof:
                self._ended.add(path)
                return 0
            case Failure.slow:
                time.sleep(size / failing.bytes_per_s)
            case Failure.flipped:
                self._flipped[path] = (self.folder / path).stat().st_size // 2
            case Failure.other_save:
                self._of_other_save.add(path)
        return size

    def has_read(self, path: str, offset: int, data: memoryview) -> None:
        at = self._flipped.get(path, -1) - offset
        if 0 <= at < len(data):
            data[at] ^= 1

    def read_from(self, path: Any) -> Any:
        if self.below(path) not in self._of_other_save:
            return path
        place = Path(path)
        same_name = sorted(place.parent.parent.glob(f"*/{place.name}"))
        return next((namesake for namesake in same_name if namesake != place), path)

    def _fails(self, kind: Kind, path: str) -> bool:
        failing = self._failing
        if failing.thread != "any" and kind is Kind.open and path.endswith(DATA_SUFFIX):
            self._wait_for_other_thread()
        here = "caller" if threading.get_ident() == self._caller else "writer"
        counts = kind is failing.operation and fnmatch(PurePath(path).name, failing.files)
        if not counts or failing.thread not in ("any", here):
            return False
        number = self.count("operation") + 1
        return number == failing.nth or (number > failing.nth and failing.failure in self._LASTS)

    def _wait_for_other_thread(self) -> None:
        """Make the caller and a thread started by it each write a file, so that neither writes all of
        them."""
        here, there = "caller", "writer"
        if threading.get_ident() != self._caller:
            here, there = there, here
        self._came[here].set()
        self._came[there].wait(_WAIT_S)


class _Writer(FileSystemWriter):
    """FileSystemWriter with the file layer of its save."""

    def __init__(self, failing: Failing, path: Path, **options: Any) -> None:
        super().__init__(path, **options)
        self._failing, self._layer = failing, FileLayer(path)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_layer": None}  # an uploading process creates another

    def reset(self, checkpoint_id: Any = None) -> None:
        super().reset(checkpoint_id)
        self._layer = self._failing.layer(self.path, "save")

    def prepare_local_plan(self, plan: Any) -> Any:
        return self._layered(super().prepare_local_plan, plan)

    def write_data(self, plan: Any, planner: Any) -> Any:
        return self._layered(super().write_data, plan, planner)

    def finish(self, metadata: Any, results: Any) -> None:
        self._layered(super().finish, metadata, results)

    def _layered(self, do: Callable[..., Any], *given: Any) -> Any:
        with layered(self._layer):
            return do(*given)


class _Reader(FileSystemReader):
    """FileSystemReader with the file layer of its load."""

    def __init__(self, failing: Failing, checkpoint_id: str) -> None:
        super().__init__(checkpoint_id)
        self._layer = failing.layer(checkpoint_id, "load")

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        with layered(self._layer):
            return super().read_metadata(*args, **kwargs)

    def read_data(self, plan: Any, planner: Any) -> Any:
        with layered(self._layer):
            return super().read_data(plan, planner)


def storage(folder: Path, config: StorageConfig, save: SaveConfig) -> Storage:
    """Return a failing storage of files in a folder, with the options of `Failing` and of
    FileSystemWriter."""
    given: dict[str, Any] = {name: option for name, option in config.options.items() if name in _OWN}
    kinds: dict[str, Any] = {"failure": Failure(given["failure"]), "operation": Kind(given["operation"])}
    failing = Failing(**{**given, **kinds})
    writer = _Writer(
        failing,
        folder,
        sync_files=config.sync_files,
        thread_count=config.thread_count,
        **sound_storage(config).options,
    )
    return Storage(writer, partial(_Reader, failing))
