"""Where DCP's checkpoints lie: one function for each storage, which returns its writer and its reader."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, StorageReader, StorageWriter

from dcpbench.checkpointers.base import file_lengths
from dcpbench.config.groups import SaveConfig, StorageConfig
from dcpbench.measure.raw_io import RawIO


@dataclass(frozen=True)
class Storage:
    """A writer and the way to make a reader.

    Args:
        writer: for saves, one after the other; it gets a new checkpoint id each time.
        reader: makes one for a checkpoint id.
        lengths: the bytes of each file of a checkpoint id, by its relative path.
        raw: how to do without DCP what a save and a load do, where there is a way.
    """

    writer: StorageWriter
    reader: Callable[[str], StorageReader]
    lengths: Callable[[str], dict[str, int]]
    raw: RawIO | None = None


def file(folder: Path, config: StorageConfig, save: SaveConfig) -> Storage:
    """Files in a folder: DCP's FileSystemWriter and FileSystemReader."""
    writer = FileSystemWriter(
        folder,
        sync_files=config.sync_files,
        thread_count=config.thread_count,
        cache_staged_state_dict=save.cache_staged_state_dict,
        **config.options,
    )
    raw = RawIO(config.thread_count, config.sync_files)
    return Storage(writer, FileSystemReader, file_lengths, raw)
