"""`torch.distributed.checkpoint` in all its save modes (a function each) and on every storage."""

import pkgutil
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import cache, partial
from multiprocessing import resource_sharer
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import (
    DefaultSavePlanner,
    SavePlanner,
    StorageReader,
)
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse

from dcpbench.checkpointers.base import Checkpointer, PendingSave, Ranks
from dcpbench.checkpointers.object_store import ObjectStore
from dcpbench.checkpointers.storage import Storage
from dcpbench.compare.stored import Stored, StoredChunk, read_whole, stored_in
from dcpbench.config.groups import Kept, PlannerConfig, SaveConfig, StagerConfig, Uploader
from dcpbench.config.schema import Config
from dcpbench.formats.audit import Manifest
from dcpbench.formats.dcp_metadata import METADATA, manifest_of, merged_manifest, metadata_in, read_metadata
from dcpbench.records.files import file_lengths
from dcpbench.state.nested import of_tensors
from dcpbench.state.process_state import kept_by_dcp
from dcpbench.torch_private import UPLOADER, UPLOADER_PROCESS

_LIMIT_S = 10.0


class DcpCheckpointer(Checkpointer):
    """Saves with DCP, as configured by `config.save` and `config.storage`."""

    def __init__(self, folder: Path, config: Config, ranks: Ranks) -> None:
        self._save, self._ranks = config.save, ranks
        make = partial(pkgutil.resolve_name(config.storage.target), folder, config.storage, config.save)
        self._slots = defaultdict[int, _Slot](lambda: _Slot(make, config.save))
        self._storage: Storage = make()
        self.raw, self.objects = self._storage.raw, self._storage.objects
        self.reader = self._storage.reader

    def save(self, state: dict[str, Any], checkpoint_id: str, slot: int = 0) -> PendingSave:
        kept, group = self._slots[slot], self._ranks.group_of(slot)
        given = kept.given()
        with ExitStack() as used_once:
            if self._save.stager and self._save.stager.instance is Kept.new:
                used_once.callback(given["async_stager"].close)
            if slot:
                reached, go_on = _hold_back(given.setdefault("planner", DefaultSavePlanner()))
            save = pkgutil.resolve_name(self._save.target)
            if self._storage.tensors_only:
                state = of_tensors(state)
            place = self.objects.place(checkpoint_id) if self.objects else checkpoint_id
            given |= {"checkpoint_id": place, "process_group": group}
            pending: PendingSave = save(state, **given, **self._save.options)
            if slot:
                pending.held_back = go_on
                pending.when_ended(reached.set)  # it can fail before
                reached.wait()
            pending.when_ended(used_once.pop_all().close)
        return pending

    def close(self) -> None:
        with ExitStack() as closed:  # each, whether or not another one raises
            closed.callback(forget_kept_by_dcp)
            closed.callback(self._storage.close)
            for slot in self._slots.values():
                closed.callback(slot.close)

    def load(self, state: dict[str, Any], checkpoint_id: str) -> None:
        self._read(self.reader, checkpoint_id, state)

    def other_ways(self, checkpoint_id: str) -> Mapping[str, Callable[[dict[str, Any]], None]]:
        return {
            f"by {what}": partial(self._read, reader, checkpoint_id)
            for what, reader in self._storage.other_readers.items()
        }

    def _read(
        self, reader: Callable[[str], StorageReader], checkpoint_id: str, state: dict[str, Any]
    ) -> None:
        if self._storage.tensors_only:
            state = of_tensors(state, self.manifest(checkpoint_id).entries)
        dcp.load(state, storage_reader=reader(checkpoint_id), process_group=self._ranks.group_of(0))

    def manifest(self, checkpoint_id: str) -> Manifest:
        """Return the contents according to `.metadata`, or the metadata of all ranks; empty if there is none.
        They are pickles, but this cell wrote them."""
        if self._storage.manifest:
            return self._storage.manifest(checkpoint_id)
        lengths = self.lengths(checkpoint_id)
        manifests = []
        for name, rank in metadata_in(lengths).items():
            metadata = self.reader(checkpoint_id).read_metadata(**({} if rank is None else {"rank": rank}))
            manifests.append(manifest_of(metadata, lengths, name))
        return merged_manifest(manifests, lengths)

    def read_tensor(self, checkpoint_id: str, key: str) -> torch.Tensor | None:
        reader = self.reader(checkpoint_id)
        if METADATA not in self.lengths(checkpoint_id):
            # Each rank's metadata lists only its chunks, and a load on one rank would read only one of them.
            chunks = self.stored(checkpoint_id).get(key)
            return read_whole(chunks) if chunks else None
        entry = reader.read_metadata().state_dict_metadata.get(key)
        if not isinstance(entry, TensorStorageMetadata):
            return None
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
        dcp.load({key: tensor}, storage_reader=reader, no_dist=True)
        return tensor

    def stored(self, checkpoint_id: str) -> Stored:
        if self._storage.stored:
            return self._storage.stored(checkpoint_id)
        if self.objects:
            return stored_objects(self.objects, checkpoint_id)
        return stored_chunks(Path(checkpoint_id))


class _Slot:
    """The arguments of the saves of a slot. A writer that is kept gets a new checkpoint id for each save,
    because it caches the staging buffer, whose bugs appear from the second save on."""

    def __init__(self, storage: Callable[[], Storage], config: SaveConfig) -> None:
        self._storage, self._config = storage, config
        self._kept: dict[str, Any] = {}

    def given(self) -> dict[str, Any]:
        """Return the arguments of the next save, by DCP's names. Without a writer DCP creates one."""
        writer = self._one_of("writer", self._config.writer, lambda: self._storage().writer)
        given: dict[str, Any] = {"storage_writer": writer}
        if planner := self._config.planner:
            make_planner = partial(DefaultSavePlanner, **_options(planner))
            given["planner"] = self._one_of("planner", planner.instance, make_planner)
        if stager := self._config.stager:  # last: it has to be closed
            make = partial(DefaultStager, StagingOptions(**_options(stager)))
            given["async_stager"] = self._one_of("stager", stager.instance, make)
        if self._config.uploader is Uploader.process:
            given["async_checkpointer_type"] = AsyncCheckpointerType.PROCESS
        return given

    def close(self) -> None:
        if stager := self._kept.pop("stager", None):
            stager.close()

    def _one_of(self, name: str, instance: Kept, make: Callable[[], Any]) -> Any:
        if instance is Kept.none:
            return None
        if instance is Kept.new:
            return make()
        if name not in self._kept:
            self._kept[name] = make()
        return self._kept[name]


def sync(state_dict: dict[str, Any], **given: Any) -> PendingSave:
    """Call `dcp.save`. When it returns, the checkpoint is complete."""
    started = time.perf_counter()
    dcp.save(state_dict, **given)
    return PendingSave(started, time.perf_counter())


def asynchronous(state_dict: dict[str, Any], **given: Any) -> PendingSave:
    """Call `dcp.async_save`. It returns when the state is staged; the upload continues in a thread.

    `process_group` must be a separate group with a CPU backend: the collectives of upload and training run
    concurrently, and on a shared group the ranks would match them differently.
    """
    started = time.perf_counter()
    upload = dcp.async_save(state_dict, **given)
    if isinstance(upload, AsyncSaveResponse):
        # With asynchronous staging, the state must not change until it is staged.
        upload.staging_completion.result()
        upload = upload.upload_completion
    return PendingSave(started, time.perf_counter(), upload=upload)


def forget_kept_by_dcp() -> None:
    """Remove everything that DCP keeps globally, which later saves of this process would use. A process that
    uploads is ended."""
    kept = kept_by_dcp()
    setattr(UPLOADER.owner, UPLOADER.name, None)
    if uploader := kept.pop(UPLOADER.name, None):
        process = UPLOADER_PROCESS.of(uploader)
        del uploader  # the last reference: this ends the process, but waits only briefly
        process.join(_LIMIT_S)
        resource_sharer.stop(_LIMIT_S)  # the thread that passed tensors to it
    for plans in kept.values():
        plans.clear()


def _options(config: StagerConfig | PlannerConfig) -> dict[str, Any]:
    return {name: value for name, value in vars(config).items() if name != "instance"}


def stored_chunks(folder: Path, rank: int | None = None) -> Stored:
    """Return the chunks in DCP's files by the byte ranges in the metadata, each the output of a `torch.save`.
    Compressed chunks are left out. With a `rank`, only that rank's metadata is used."""
    named = metadata_in(file_lengths(folder)).items()
    metadata = (read_metadata(folder / name) for name, of_rank in named if rank in (None, of_rank))
    path_of = cache(folder.joinpath)
    return _chunks_in(metadata, lambda name, *place: _read_range(path_of(name), *place))


def stored_objects(objects: ObjectStore, checkpoint_id: str) -> Stored:
    """Return the same for the objects of a checkpoint. Only the bytes that are read are fetched."""

    def metadata() -> Iterator[Any]:
        for name in metadata_in(objects.lengths(checkpoint_id)):
            with objects.part(checkpoint_id, name) as file:
                yield read_metadata(file)

    def read(name: str, offset: int, length: int) -> torch.Tensor:
        with objects.part(checkpoint_id, name, offset, length) as file:
            return _read_range(file, 0, length)

    return _chunks_in(metadata(), read)


def _chunks_in(metadata: Iterable[Any], read: Callable[[str, int, int], torch.Tensor]) -> Stored:
    """Return the chunks in these metadata; `read` takes a file, an offset and a length."""
    stored: defaultdict[str, list[StoredChunk]] = defaultdict(list)
    for one_of in metadata:
        for index, place in one_of.storage_data.items():
            entry = one_of.state_dict_metadata.get(index.fqn)
            if not hasattr(entry, "chunks") or place.transform_descriptors:
                continue
            sizes = [
                tuple(stored_part.sizes)
                for stored_part in entry.chunks
                if stored_part.offsets == index.offset
            ]
            read_chunk = partial(read, place.relative_path, place.offset, place.length)
            stored[index.fqn] += [StoredChunk(tuple(index.offset), size, read_chunk) for size in sizes]
    return stored


def _read_range(path: Path, offset: int, length: int) -> torch.Tensor:
    chunk = stored_in(path, offset, length)
    assert isinstance(chunk, StoredChunk)
    return chunk.read()


def _hold_back(planner: SavePlanner) -> tuple[threading.Event, threading.Event]:
    """Hold back the save that gets this planner. It sets the first event when it has planned, and writes no
    data until the second event is set."""
    reached, go_on = threading.Event(), threading.Event()
    finish_plan = type(planner).finish_plan

    def wait_and_finish(plan: Any) -> Any:
        reached.set()
        go_on.wait()
        return finish_plan(planner, plan)

    vars(planner)["finish_plan"] = wait_and_finish
    return reached, go_on
