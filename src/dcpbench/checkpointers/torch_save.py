"""The full state in one file, which rank 0 writes and every rank reads: by `torch.save`, or otherwise."""

import io
import os
import time
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from dcpbench.checkpointers.base import Checkpointer, PendingSave, Ranks, file_lengths
from dcpbench.checkpointers.nested import check_fits, slots, state_dicts
from dcpbench.checkpointers.raw_io import RawIO
from dcpbench.checkpointers.tensors_only import packed, unpacked
from dcpbench.checkpointers.torch_file import stored_in
from dcpbench.config.schema import Config
from dcpbench.verify.audit import Chunk, Entry, Manifest
from dcpbench.verify.layout import extent_of
from dcpbench.verify.plain_read import Stored, StoredChunk
from dcpbench.verify.snapshot import local_part


class TorchSaveCheckpointer(Checkpointer):
    """Rank 0 writes the state, sharded tensors whole and with what other ranks alone have; every rank reads
    the file, as `weights_only`: plain tensors and values. Each rank has every tensor whole for a moment.

    `_write`, `_leaves`, `_value`, `manifest` and `stored` are what another format has of its own.
    """

    file = "state.pt"

    def __init__(self, folder: Path, config: Config, ranks: Ranks) -> None:
        self._ranks = ranks
        self._sync_files = config.storage.sync_files
        self.raw = RawIO(config.storage.thread_count, config.storage.sync_files)

    def save(self, state: dict[str, Any], checkpoint_id: str, slot: int = 0) -> PendingSave:
        """Write a state; the file appears whole or not at all, and with `sync_files` it stays once this has
        returned, whatever fails."""
        started = time.perf_counter()
        nested = {name: _portable(value, name) for name, value in state_dicts(state).items()}
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
        with unfinished.open("wb") as file:
            self._write(nested, file)
            if self._sync_files:
                file.flush()
                os.fsync(file.fileno())
        unfinished.replace(folder / self.file)
        if self._sync_files:
            for path in changed:
                _sync(path)

    def _of_other_ranks(self, nested: dict[str, Any]) -> list[Any]:
        """Of each rank the dictionaries that have only what rank 0 has not, as its random generators; nothing
        but on rank 0."""
        if (group := self._ranks.group_of(0)) is None:
            return []
        keys: list[Any] = [{key for _, _, key in slots(nested)}]
        dist.broadcast_object_list(keys, src=0, group=group)
        everybody: list[Any] = [None] * self._ranks.size
        own = _without(nested, keys[0])
        dist.gather_object(own, everybody if self._ranks.rank == 0 else None, dst=0, group=group)
        return [theirs for theirs in everybody if theirs]

    @torch.no_grad()
    def load(self, state: dict[str, Any], checkpoint_id: str) -> None:
        """Fill a state with what a checkpoint holds of it.

        Raises:
            RuntimeError: it does not hold all of it.
            ValueError: a tensor has another shape.
        """
        held = self._leaves(checkpoint_id)
        templates = state_dicts(state)
        check_fits(held, templates)
        for container, name, key in slots(templates):
            value, saved = container[name], held[key]
            if isinstance(value, torch.Tensor):
                local = local_part(value)
                local.copy_(extent_of(value).take(saved).reshape(local.shape))
            else:
                container[name] = self._value(saved, like=value)
        for name, one in state.items():
            if isinstance(one, Stateful):
                one.load_state_dict(templates[name])
            else:
                state[name] = templates[name]

    def manifest(self, checkpoint_id: str) -> Manifest:
        """What the file says. It is a zip archive, whose directory stands at its very end: one that has
        lost its end cannot be opened, so the length that it names is the one that it has."""
        entries = {}
        for key, value in self._leaves(checkpoint_id).items():
            if isinstance(value, torch.Tensor):
                shape = tuple(value.shape)
                whole = Chunk((0,) * len(shape), shape, self.file)
                entries[key] = Entry(shape, str(value.dtype), (whole,))
            else:
                entries[key] = Entry(None, None, (Chunk((), (), self.file),))
        found = file_lengths(checkpoint_id)
        return Manifest(entries, {self.file: found[self.file]}, found)

    def read_tensor(self, checkpoint_id: str, key: str) -> torch.Tensor | None:
        held = self._leaves(checkpoint_id).get(key)
        return held.clone() if isinstance(held, torch.Tensor) else None

    def stored(self, checkpoint_id: str) -> Stored:
        held = stored_in(Path(checkpoint_id) / self.file)
        leaves = ((key, container[name]) for container, name, key in slots(held))
        return {key: [chunk] for key, chunk in leaves if isinstance(chunk, StoredChunk)}

    def _write(self, nested: dict[str, Any], file: BinaryIO) -> None:
        """Write dictionaries of tensors and values."""
        torch.save(nested, file)

    def _leaves(self, checkpoint_id: str) -> dict[str, Any]:
        """The leaves of a checkpoint by their flattened keys; a tensor is read when it is used."""
        path = Path(checkpoint_id) / self.file
        held = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        return {key: container[name] for container, name, key in slots(held)}

    def _value(self, saved: Any, like: Any) -> Any:
        """What is no tensor, of what `_leaves` has for it."""
        return unpacked(saved, like) if isinstance(like, io.BytesIO) else saved


def _sync(folder: Path) -> None:
    """Make the names in a folder last: of a file that is synced its own name is not."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _without(nested: dict[str, Any], keys: set[str], prefix: str = "") -> dict[str, Any]:
    """The dictionaries without the leaves that have these keys."""
    kept = {}
    for name, value in nested.items():
        if isinstance(value, dict):
            value = _without(value, keys, f"{prefix}{name}.")
        elif isinstance(value, list) or f"{prefix}{name}" in keys:
            continue
        if not isinstance(value, dict) or value:
            kept[name] = value
    return kept


def _add(nested: dict[str, Any], more: dict[str, Any]) -> None:
    """Add to dictionaries what others have more."""
    for name, value in more.items():
        if isinstance(nested.get(name), dict):
            _add(nested[name], value)
        else:
            nested[name] = value


def _portable(nested: Any, key: str) -> Any:
    """The same with streams as tensors of their bytes, which `weights_only` reads, and what is sharded whole;
    collective."""
    if isinstance(nested, dict):
        return {name: _portable(value, f"{key}.{name}") for name, value in nested.items()}
    if isinstance(nested, list):
        return [_portable(value, f"{key}.{number}") for number, value in enumerate(nested)]
    if isinstance(nested, DTensor):
        return nested.full_tensor()
    if isinstance(nested, io.BytesIO):
        return packed(nested)
    return nested
