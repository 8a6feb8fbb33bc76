"""Storages of DCP: a function for each place and format, which returns its writer and its reader."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import (
    FileSystemReader,
    FileSystemWriter,
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
    StorageReader,
    StorageWriter,
)
from torch.distributed.checkpoint.filesystem import SerializationFormat

from dcpbench.checkpointers.object_store import ObjectStore
from dcpbench.checkpointers.raw_io import RawIO
from dcpbench.compare.stored import Stored, StoredChunk
from dcpbench.config.groups import SaveConfig, StorageConfig
from dcpbench.core.mismatch import Mismatch, Problem
from dcpbench.formats.audit import Manifest
from dcpbench.formats.dcp_metadata import MetadataError
from dcpbench.formats.safetensors_headers import safetensors_manifest
from dcpbench.records.files import file_lengths
from dcpbench.torch_private import FSSPEC_READER, FSSPEC_WRITER

_SHARDED = "sharded"
"""Folder in a checkpoint for the ranks' files, if they are consolidated."""


@dataclass(frozen=True)
class Storage:
    """A storage of DCP.

    Args:
        writer: for consecutive saves; it gets a new checkpoint id for each.
        reader: returns a reader for a checkpoint id.
        raw: writes and reads the same number of bytes in plain files, if there is an equivalent.
        objects: the store, if checkpoints are not stored in folders.
        manifest: returns the contents of a checkpoint without `.metadata`.
        stored: returns the chunks of a checkpoint, if its files do not have DCP's layout.
        other_readers: by a phrase that describes the source, return further readers.
        close: releases data that is not in a folder.
        tensors_only: True if the format can store only tensors, so that any other value has to be saved as a
            tensor of its bytes.
    """

    writer: StorageWriter
    reader: Callable[[str], StorageReader]
    raw: RawIO | None = None
    objects: ObjectStore | None = None
    manifest: Callable[[str], Manifest] | None = None
    stored: Callable[[str], Stored] | None = None
    other_readers: Mapping[str, Callable[[str], StorageReader]] = field(default_factory=dict)
    close: Callable[[], object] = object
    tensors_only: bool = False


def file(folder: Path, config: StorageConfig, save: SaveConfig) -> Storage:
    """Return the storage for files in a folder: DCP's FileSystemWriter and FileSystemReader."""
    options: dict[str, Any] = dict(config.options)
    if "serialization_format" in options:
        options["serialization_format"] = SerializationFormat(options["serialization_format"])
    writer = FileSystemWriter(
        folder,
        sync_files=config.sync_files,
        thread_count=config.thread_count,
        cache_staged_state_dict=save.cache_staged_state_dict,
        **options,
    )
    raw = RawIO(config.thread_count, config.sync_files)
    return Storage(writer, FileSystemReader, raw=raw)


def fsspec(folder: Path, config: StorageConfig, save: SaveConfig) -> Storage:
    """Return the storage for fsspec: DCP's FsspecWriter and FsspecReader. `options.url` (`memory://`) is the
    prefix of a checkpoint's path, and `options.file_system` are options of fsspec's file system. Without a
    URL these are files in a folder."""
    options: dict[str, Any] = dict(config.options)
    options.pop("url", None)
    of_store: dict[str, Any] = options.pop("file_system", {})
    objects = ObjectStore(config.url, of_store) if config.url else None
    place = objects.place if objects else str
    writer = FSSPEC_WRITER.value(
        place(str(folder)),
        sync_files=config.sync_files,
        thread_count=config.thread_count,
        **options,
        **of_store,
    )
    # torch drops these options when it is given a checkpoint id.
    vars(writer.fs)["init_path"] = partial(writer.fs.init_path, **of_store)

    def reader(checkpoint_id: str) -> StorageReader:
        made: StorageReader = FSSPEC_READER.value(place(checkpoint_id), **of_store)
        return made

    if not objects:
        return Storage(writer, reader, RawIO(config.thread_count, config.sync_files))
    in_memory = config.url.startswith("memory:")
    forget = partial(objects.remove, str(folder)) if in_memory else object
    return Storage(writer, reader, objects=objects, close=forget)


class _HuggingFaceWriter(HuggingFaceStorageWriter):
    """torch's writer. After `reset`, that one would still consolidate into its first folder, and would have
    no folder for the ranks' files."""

    def reset(self, checkpoint_id: Any = None) -> None:
        super().reset(checkpoint_id)
        if checkpoint_id and self.enable_consolidation:
            self.consolidated_output_path = str(self.path)
            self.path = self.fs.concat_path(self.path, _SHARDED)


def hugging_face(folder: Path, config: StorageConfig, save: SaveConfig) -> Storage:
    """Return the storage for safetensors: DCP's HuggingFaceStorageWriter and HuggingFaceStorageReader. With
    `options.tensors_only`, other values are saved as tensors."""
    options: dict[str, Any] = dict(config.options)
    tensors_only = options.pop("tensors_only")
    writer = _HuggingFaceWriter(str(folder), thread_count=config.thread_count, **options)
    writer.sync_files = config.sync_files
    consolidates = writer.enable_consolidation
    others = {
        "each rank's files": lambda checkpoint_id: HuggingFaceStorageReader(f"{checkpoint_id}/{_SHARDED}")
    }
    return Storage(
        writer,
        partial(HuggingFaceStorageReader, thread_count=config.thread_count),
        # Consolidated files and the index are never synced.
        raw=RawIO(config.thread_count, config.sync_files and writer.save_distributed and not consolidates),
        manifest=_safetensors_manifest,
        stored=_safetensors_stored,
        other_readers=others if consolidates else {},
        tensors_only=tensors_only,
    )


def _safetensors_manifest(checkpoint_id: str) -> Manifest:
    """Return the contents according to the headers, without the ranks' files if they were consolidated; empty
    if a header is invalid."""
    lengths = file_lengths(checkpoint_id)
    try:
        manifest = safetensors_manifest(Path(checkpoint_id), lengths)
    except MetadataError as error:
        name, _, why = str(error).partition(": ")
        unreadable = Mismatch(name, Problem.unreadable, facts={"error": why})
        return Manifest({}, {}, lengths, frozenset(lengths), found_wrong=(unreadable,))
    sharded = {name for name in lengths if name.startswith(f"{_SHARDED}/")}
    return replace(manifest, own=manifest.own | sharded)


def _safetensors_stored(checkpoint_id: str) -> Stored:
    """Return the chunks as the library safetensors reads them."""
    read = partial(partial, _read_tensor, checkpoint_id)
    return {
        key: [StoredChunk(chunk.offsets, chunk.sizes, read(str(chunk.file), key)) for chunk in entry.chunks]
        for key, entry in _safetensors_manifest(checkpoint_id).entries.items()
    }


def _read_tensor(checkpoint_id: str, file: str, key: str) -> torch.Tensor:
    from safetensors import safe_open

    with safe_open(f"{checkpoint_id}/{file}", framework="pt") as opened:
        tensor: torch.Tensor = opened.get_tensor(key)
        return tensor
