"""Checkpoints with the full state in one file, which rank 0 writes and every rank reads."""

import io
import os
import time
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from dcpbench.checkpointers.base import Checkpointer, PendingSave, Ranks
from dcpbench.checkpointers.raw_io import RawIO
from dcpbench.compare.stored import Stored, StoredChunk, stored_in
from dcpbench.config.schema import Config
from dcpbench.core.state import Name, text_of
from dcpbench.formats.audit import Chunk, Entry, Manifest
from dcpbench.records.files import file_lengths
from dcpbench.state.layout import extent_of
from dcpbench.state.nested import check_fits, packed, state_dicts, unpacked
from dcpbench.state.snapshot import entries_of, flattened, leaf_slots, local_part, map_leaves

_ARRAYS: list[Any] = [
    *{array.__reduce__()[0] for array in (np.zeros(1), np.float32(0))},
    *(np.ndarray, np.dtype, *{type(np.dtype(code)) for code in np.typecodes["All"]}),
]
"""The classes and functions in pickles of NumPy's arrays and numbers; none of them runs other code."""


class TorchSaveCheckpointer(Checkpointer):
    """`torch.save`: rank 0 writes full tensors and the values that only other ranks have; every rank reads
    the file with `weights_only`. Each rank has every full tensor temporarily.

    Another format overrides `_write`, `_leaves`, `_value`, `manifest` and `stored`.
    """

    file = "state.pt"

    def __init__(self, folder: Path, config: Config, ranks: Ranks) -> None:
        self._ranks = ranks
        self._sync_files = config.storage.sync_files
        self.raw = RawIO(config.storage.thread_count, config.storage.sync_files)

    def save(self, state: dict[str, Any], checkpoint_id: str, slot: int = 0) -> PendingSave:
        """Write a state. The file appears atomically; with `sync_files` it is durable when this returns."""
        started = time.perf_counter()
        nested = map_leaves(state_dicts(state), _portable)
        for theirs in self._of_other_ranks(nested):
            _add(nested, theirs)
        if self._ranks.rank == 0:
            self._put(nested, Path(checkpoint_id))
        self._ranks.meet()
        return PendingSave(started, time.perf_counter())

    def _put(self, nested: dict[str, Any], folder: Path) -> None:
        changed = [folder, *(path.parent for path in (folder, *folder.parents) if not path.exists())]
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = folder / f"{self.file}.unfinished"
        try:
            with unfinished.open("wb") as file:
                self._write(nested, file)
                if self._sync_files:
                    file.flush()
                    os.fsync(file.fileno())
            unfinished.replace(folder / self.file)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
        if self._sync_files:
            for path in changed:
                _sync(path)

    def _of_other_ranks(self, nested: dict[str, Any]) -> list[Any]:
        """Return, on rank 0, the dictionaries of each rank with only the keys that rank 0 does not have, such
        as random generators."""
        if (group := self._ranks.group_of(0)) is None:
            return []
        keys: list[Any] = [{name for *_, name in leaf_slots(nested)}]
        dist.broadcast_object_list(keys, src=0, group=group)
        all_ranks: list[Any] = [None] * self._ranks.size
        only_here = _without(nested, keys[0])
        dist.gather_object(only_here, all_ranks if self._ranks.rank == 0 else None, dst=0, group=group)
        return [theirs for theirs in all_ranks if theirs]

    @torch.no_grad()
    def load(self, state: dict[str, Any], checkpoint_id: str) -> None:
        """Fill a state from a checkpoint.

        Raises:
            RuntimeError: a key is missing in the checkpoint.
            ValueError: a tensor has a different shape or dtype.
        """
        stored = self._leaves(checkpoint_id)
        templates = state_dicts(state)
        check_fits(stored, templates)
        for container, last, place in leaf_slots(templates):
            value, saved = container[last], stored[text_of(place)]
            if isinstance(value, torch.Tensor):
                local = local_part(value)
                local.copy_(extent_of(value).take(saved).reshape(local.shape))
            else:
                container[last] = self._value(saved, like=value)
        for name, holder in state.items():
            if isinstance(holder, Stateful):
                holder.load_state_dict(templates[name])
            else:
                state[name] = templates[name]

    def manifest(self, checkpoint_id: str) -> Manifest:
        """Return the contents of the file. It is a zip archive with its directory at the end; if it can be
        opened, its length is correct."""
        entries = {}
        for key, value in self._leaves(checkpoint_id).items():
            if isinstance(value, torch.Tensor):
                shape = tuple(value.shape)
                whole = Chunk((0,) * len(shape), shape, self.file)
                entries[key] = Entry(shape, str(value.dtype), (whole,))
            else:
                entries[key] = Entry(None, None, (Chunk((), (), self.file),))
        lengths = file_lengths(checkpoint_id)
        return Manifest(entries, {self.file: lengths[self.file]}, lengths)

    def read_tensor(self, checkpoint_id: str, key: str) -> torch.Tensor | None:
        stored = self._leaves(checkpoint_id).get(key)
        return stored.clone() if isinstance(stored, torch.Tensor) else None

    def stored(self, checkpoint_id: str) -> Stored:
        nested = stored_in(Path(checkpoint_id) / self.file)
        leaves = flattened(nested).items()
        return {key: [chunk] for key, chunk in leaves if isinstance(chunk, StoredChunk)}

    def _write(self, nested: dict[str, Any], file: BinaryIO) -> None:
        """Write nested dictionaries of tensors and values."""
        torch.save(nested, file)

    def _leaves(self, checkpoint_id: str) -> dict[str, Any]:
        """Return the values of a checkpoint by flattened key; a tensor is read when it is used."""
        path = Path(checkpoint_id) / self.file
        with torch.serialization.safe_globals(_ARRAYS):
            nested = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        return flattened(nested)

    def _value(self, saved: Any, like: Any) -> Any:
        """Return the original of a value from `_leaves` that was not a tensor."""
        return unpacked(saved, like) if isinstance(like, io.BytesIO) else saved


def _sync(folder: Path) -> None:
    """Sync a folder, because syncing a file does not make its name durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _without(nested: dict[str, Any], names: set[Name], prefix: Name = ()) -> dict[str, Any]:
    """Return nested dictionaries without these names, without lists, and without empty dictionaries."""
    kept = {}
    for key, value, name in entries_of(nested, prefix):
        if isinstance(value, dict):
            value = _without(value, names, name)
        elif isinstance(value, list) or name in names:
            continue
        if not isinstance(value, dict) or value:
            kept[key] = value
    return kept


def _add(nested: dict[str, Any], more: dict[str, Any]) -> None:
    """Merge further nested dictionaries into nested ones."""
    for name, value in more.items():
        if isinstance(nested.get(name), dict):
            _add(nested[name], value)
        else:
            nested[name] = value


def _portable(value: Any, _: Name) -> Any:
    """Return a full tensor for a part of one, a tensor of bytes for a stream, which `weights_only` can read,
    and any other value unchanged; collective."""
    if isinstance(value, DTensor):
        return value.full_tensor()
    return packed(value) if isinstance(value, io.BytesIO) else value
