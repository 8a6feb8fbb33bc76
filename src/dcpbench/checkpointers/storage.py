"""Where a checkpoint lies: one function for each storage, which returns its writer and its reader."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch.distributed.checkpoint import (
    FileSystemReader,
    FileSystemWriter,
    StorageReader,
    StorageWriter,
)

from dcpbench.config.groups import SaveConfig, StorageConfig
from dcpbench.measure import raw_io


@dataclass(frozen=True)
class Raw:
    """Files of some lengths (bytes), written into a new folder, and read and removed with it."""

    write: Callable[[Path, Sequence[int]], None]
    read: Callable[[Path, Sequence[int]], None]


@dataclass(frozen=True)
class Storage:
    """A writer and the way to make a reader.

    There is one writer for all saves of a cell, told of a new checkpoint id each time: a cached
    staging buffer lives in the writer, and only shows its faults from the second save on.
    """

    writer: StorageWriter
    reader: Callable[[str], StorageReader]
    lengths: Callable[[str], dict[str, int]]
    """The bytes of each file of a checkpoint id, by its relative path."""
    raw: Raw | None = None
    """How to do without DCP what a save and a load do, where that can be told."""

    def size(self, checkpoint_id: str) -> int:
        """Bytes that a checkpoint id takes up."""
        return sum(self.lengths(checkpoint_id).values())


def file(folder: Path, config: StorageConfig, save: SaveConfig) -> Storage:
    """Files in a folder: DCP's FileSystemWriter and FileSystemReader."""
    writer = FileSystemWriter(
        folder,
        sync_files=config.sync_files,
        thread_count=config.thread_count,
        cache_staged_state_dict=save.cache_staged_state_dict,
        **config.options,
    )
    threads = config.thread_count
    plain_files = Raw(
        partial(raw_io.write, threads=threads, sync=config.sync_files), partial(raw_io.read, threads=threads)
    )
    return Storage(writer=writer, reader=FileSystemReader, lengths=_file_lengths, raw=plain_files)


def _file_lengths(checkpoint_id: str) -> dict[str, int]:
    root = Path(checkpoint_id)
    return {str(item.relative_to(root)): item.stat().st_size for item in root.rglob("*") if item.is_file()}
