"""A storage that fails: DCP's FileSystemWriter and FileSystemReader over a file layer in which one operation
goes wrong, or all from one on.

What fails is in the options, and counted anew in each save and each load on each rank. Who meets it leaves a
mark beside the checkpoint.
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

from dcpbench.checkpointers.dcp_metadata import DATA_SUFFIX
from dcpbench.checkpointers.storage import Storage, file
from dcpbench.config.groups import SaveConfig, StorageConfig, rank_of
from dcpbench.plugins.crash.file_layer import FileLayer, layered
from dcpbench.plugins.crash.operations import Kind

_WAIT_S = 5.0


class Failure(StrEnum):
    """What goes wrong."""

    enospc = "enospc"  # no space left on device, from this operation on
    eio = "eio"  # an error of the device
    short = "short"  # half of the bytes are written, or read, and the call says so
    eof = "eof"  # the file ends here
    flipped = "flipped"  # of the file that is opened one bit, in its middle, is another
    missing = "missing"  # the file that is opened is not there
    other_save = "other_save"  # instead of the file that is opened, that of a checkpoint beside is
    slow = "slow"  # this operation and those after it take as long as `bytes_per_s` says


@dataclass(frozen=True)
class Failing:
    """When an operation fails, and how.

    Args:
        failure: what goes wrong.
        of: in a `save` or in a `load`.
        operation: the kind that fails: open, write, fsync, rename, unlink, mkdir; of a load open or read.
        nth: which one of these, from 1.
        files: a pattern for the names of the files that count.
        rank: the rank that it fails on, -1 is the last; null: on each.
        thread: `caller`, the one that DCP calls the writer in, a `writer` that this has started, or `any`.
        bytes_per_s: of a slow device.
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
            raise ValueError(f"failure={self.failure}: is of a file that is read: of=load, operation=open")

    def layer(self, checkpoint: Any, of: str) -> FileLayer:
        """What a save or a load passes on this rank."""
        rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        if of != self.of or (self.rank is not None and rank != rank_of(self.rank, size)):
            return FileLayer(Path(checkpoint))
        return _FailingLayer(self, Path(checkpoint), rank)


_OWN = frozenset(one.name for one in fields(Failing))


def has_met(checkpoint: Path) -> bool:
    """Whether a rank met the failure in a save or a load of a checkpoint."""
    return any(checkpoint.parent.glob(f"{checkpoint.name}.met-*"))


def sound_storage(config: StorageConfig) -> StorageConfig:
    """The same storage on a device that does not fail."""
    options = {name: value for name, value in config.options.items() if name not in _OWN}
    return replace(config, target=f"{file.__module__}.{file.__name__}", options=options)


class _FailingLayer(FileLayer):
    """Of one save or load on one rank."""

    reads = True
    _LASTS: ClassVar = {Failure.enospc, Failure.slow}

    def __init__(self, failing: Failing, checkpoint: Path, rank: int) -> None:
        super().__init__(checkpoint)
        self._failing = failing
        self._mark = checkpoint.with_name(f"{checkpoint.name}.met-{rank}")
        self._caller = threading.get_ident()
        self._came = {thread: threading.Event() for thread in ("caller", "writer")}
        self._ended, self._of_other_save = set[str](), set[str]()
        self._flipped: dict[str, int] = {}

    def begin(self, kind: Kind, path: str, size: int = 0) -> int:
        failing = self._failing
        if path in self._ended:
            return 0
        if not self._is_met(kind, path):
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
        beside = sorted(place.parent.parent.glob(f"*/{place.name}"))
        return next((other for other in beside if other != place), path)

    def _is_met(self, kind: Kind, path: str) -> bool:
        failing = self._failing
        if failing.thread != "any" and kind is Kind.open and path.endswith(DATA_SUFFIX):
            self._meet()
        here = "caller" if threading.get_ident() == self._caller else "writer"
        counts = kind is failing.operation and fnmatch(PurePath(path).name, failing.files)
        if not counts or failing.thread not in ("any", here):
            return False
        number = self.count("operation") + 1
        return number == failing.nth or (number > failing.nth and failing.failure in self._LASTS)

    def _meet(self) -> None:
        """No thread takes all there is to write: the caller and one that it has started each have a file."""
        here, there = "caller", "writer"
        if threading.get_ident() != self._caller:
            here, there = there, here
        self._came[here].set()
        self._came[there].wait(_WAIT_S)


class _Writer(FileSystemWriter):
    """Torch's own, each step of which passes the layer of its save."""

    def __init__(self, failing: Failing, path: Path, **options: Any) -> None:
        super().__init__(path, **options)
        self._failing, self._layer = failing, FileLayer(path)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_layer": None}  # a process that uploads makes its own

    def reset(self, checkpoint_id: Any = None) -> None:
        super().reset(checkpoint_id)
        self._layer = self._failing.layer(self.path, "save")

    def prepare_local_plan(self, plan: Any) -> Any:
        return self._passing(super().prepare_local_plan, plan)

    def write_data(self, plan: Any, planner: Any) -> Any:
        return self._passing(super().write_data, plan, planner)

    def finish(self, metadata: Any, results: Any) -> None:
        self._passing(super().finish, metadata, results)

    def _passing(self, do: Callable[..., Any], *given: Any) -> Any:
        with layered(self._layer):
            return do(*given)


class _Reader(FileSystemReader):
    """Torch's own, each step of which passes the layer of its load."""

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
    """Files in a folder, on a device that fails: the options of `Failing` and of FileSystemWriter."""
    given: dict[str, Any] = {name: value for name, value in config.options.items() if name in _OWN}
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
