"""`torch.distributed.checkpoint`, in all its ways of saving (a function each) and on every storage."""

import io
import pkgutil
import threading
import time
import zipfile
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import StorageReader, StorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

from dcpbench.checkpointers.base import Checkpointer, PendingSave, Ranks
from dcpbench.checkpointers.dcp_metadata import METADATA, manifest_of, read_metadata
from dcpbench.checkpointers.storage import Storage
from dcpbench.checkpointers.torch_file import stored_in
from dcpbench.config.schema import Config
from dcpbench.verify.audit import Manifest
from dcpbench.verify.plain_read import Stored, StoredChunk


class DcpCheckpointer(Checkpointer):
    """Saves as `config.save` says and lies where `config.storage` says.

    There is one writer for all saves in a slot, which gets a new checkpoint id each time: a cached staging
    buffer lives in the writer, and only shows its faults from the second save on.
    """

    def __init__(self, folder: Path, config: Config, ranks: Ranks) -> None:
        self._save, self._ranks = config.save, ranks
        make = partial(pkgutil.resolve_name(config.storage.target), folder, config.storage, config.save)
        self._storages: defaultdict[int, Storage] = defaultdict(make)
        self.raw = self._storages[0].raw

    def save(self, state: dict[str, Any], checkpoint_id: str, slot: int = 0) -> PendingSave:
        writer, group = self._storages[slot].writer, self._ranks.group_of(slot)
        held_back = _hold_back(writer) if slot else None
        save = pkgutil.resolve_name(self._save.target)
        pending: PendingSave = save(state, checkpoint_id, writer, group, **self._save.options)
        pending.held_back = held_back
        return pending

    def load(self, state: dict[str, Any], checkpoint_id: str) -> None:
        dcp.load(state, storage_reader=self.reader(checkpoint_id), process_group=self._ranks.group_of(0))

    def manifest(self, checkpoint_id: str) -> Manifest:
        """What `.metadata` says. It is a pickle, and one that this cell wrote."""
        metadata = self.reader(checkpoint_id).read_metadata()
        return manifest_of(metadata, self._storages[0].lengths(checkpoint_id))

    def read_tensor(self, checkpoint_id: str, key: str) -> torch.Tensor | None:
        reader = self.reader(checkpoint_id)
        entry = reader.read_metadata().state_dict_metadata.get(key)
        if not isinstance(entry, TensorStorageMetadata):
            return None
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
        dcp.load({key: tensor}, storage_reader=reader, no_dist=True)
        return tensor

    def stored(self, checkpoint_id: str) -> Stored:
        return stored_chunks(Path(checkpoint_id))

    def size(self, checkpoint_id: str) -> int:
        return sum(self._storages[0].lengths(checkpoint_id).values())

    def reader(self, checkpoint_id: str) -> StorageReader:
        """For what only DCP can do."""
        return self._storages[0].reader(checkpoint_id)


def sync(
    state_dict: dict[str, Any], checkpoint_id: str, writer: StorageWriter, group: dist.ProcessGroup | None
) -> PendingSave:
    """`dcp.save`, coordinated in `group`: when it returns, the checkpoint is complete."""
    started = time.perf_counter()
    dcp.save(state_dict, checkpoint_id=checkpoint_id, storage_writer=writer, process_group=group)
    return PendingSave(started, time.perf_counter())


def asynchronous(
    state_dict: dict[str, Any], checkpoint_id: str, writer: StorageWriter, group: dist.ProcessGroup | None
) -> PendingSave:
    """`dcp.async_save`: it returns once the state is staged, the upload goes on in a thread.

    `group` must be one of its own with a CPU backend: the upload's collectives run beside the training's,
    and on a shared group the ranks would pair them up differently.
    """
    started = time.perf_counter()
    upload = dcp.async_save(
        state_dict, checkpoint_id=checkpoint_id, storage_writer=writer, process_group=group
    )
    if isinstance(upload, AsyncSaveResponse):
        # Where staging is asynchronous too, the state must not change before it is staged.
        upload.staging_completion.result()
        upload = upload.upload_completion
    return PendingSave(started, time.perf_counter(), upload=upload)


def stored_chunks(folder: Path) -> Stored:
    """What lies in DCP's files by the byte ranges that `.metadata` names, each the output of a `torch.save`.
    What is compressed cannot be read so."""
    path = folder / METADATA
    if not path.exists():
        return {}
    metadata = read_metadata(path)
    stored: defaultdict[str, list[StoredChunk]] = defaultdict(list)
    for index, place in metadata.storage_data.items():
        entry = metadata.state_dict_metadata.get(index.fqn)
        if not hasattr(entry, "chunks") or place.transform_descriptors:
            continue
        sizes = [tuple(one.sizes) for one in entry.chunks if one.offsets == index.offset]
        read = partial(_read_range, folder / place.relative_path, place.offset, place.length)
        stored[index.fqn] += [StoredChunk(tuple(index.offset), size, read) for size in sizes]
    return stored


def _read_range(path: Path, offset: int, length: int) -> torch.Tensor:
    with path.open("rb") as file:
        file.seek(offset)
        archive = zipfile.ZipFile(io.BytesIO(file.read(length)))
    held = stored_in(archive, archive.read)
    assert isinstance(held, StoredChunk)
    return held.read()


def _hold_back(writer: StorageWriter) -> threading.Event:
    """Have a writer write no data until the event is set: its save is certain to be under way until then."""
    go_on = threading.Event()
    write_data = type(writer).write_data

    def wait_and_write(*arguments: Any) -> Any:
        go_on.wait()
        return write_data(writer, *arguments)

    vars(writer)["write_data"] = wait_and_write
    return go_on
