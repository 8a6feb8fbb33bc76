"""`torch.save`: the full state in one file, for what every rank has all of. Nothing is resharded."""

import io
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from dcpbench.checkpointers.base import Checkpointer, PendingSave, Ranks, file_lengths
from dcpbench.checkpointers.storage import plain_files
from dcpbench.config.schema import Config
from dcpbench.verify.audit import Chunk, Entry, Manifest

FILE = "state.pt"

_Path = tuple[str | int, ...]


class TorchSaveCheckpointer(Checkpointer):
    """Rank 0 writes its state, and every rank reads the file, as `weights_only`: plain tensors and values."""

    def __init__(self, folder: Path, config: Config, ranks: Ranks) -> None:
        self._ranks = ranks
        self._sync_files = config.storage.sync_files
        self.raw = plain_files(config.storage)

    def save(self, state: dict[str, Any], checkpoint_id: str, slot: int = 0) -> PendingSave:
        """Write a state; the file appears whole or not at all.

        Raises:
            ValueError: a tensor of it is sharded.
        """
        started = time.perf_counter()
        nested = {name: _portable(value, name) for name, value in _state_dicts(state).items()}
        if self._ranks.rank == 0:
            folder = Path(checkpoint_id)
            folder.mkdir(parents=True, exist_ok=True)
            unfinished = folder / f"{FILE}.unfinished"
            with unfinished.open("wb") as file:
                torch.save(nested, file)
                if self._sync_files:
                    file.flush()
                    os.fsync(file.fileno())
            unfinished.replace(folder / FILE)
        self._ranks.meet()
        ended = time.perf_counter()
        return PendingSave(started, ended, completed=ended)

    @torch.no_grad()
    def load(self, state: dict[str, Any], checkpoint_id: str) -> None:
        """Fill a state with what a checkpoint holds of it.

        Raises:
            RuntimeError: it does not hold all of it.
            ValueError: a tensor has another shape.
        """
        held = _read(checkpoint_id)
        for name, template in _state_dicts(state).items():
            _fill(template, held, (name,))
            if isinstance(state[name], Stateful):
                state[name].load_state_dict(template)

    def manifest(self, checkpoint_id: str) -> Manifest:
        """What the file says. It is a zip archive, whose directory stands at its very end: one that has
        lost its end cannot be opened, so the length that it names is the one that it has."""
        entries = {}
        for path, value in _read(checkpoint_id).items():
            if isinstance(value, torch.Tensor):
                shape = tuple(value.shape)
                whole = Chunk((0,) * len(shape), shape, FILE)
                entries[_key(path)] = Entry(shape, str(value.dtype), (whole,))
            else:
                entries[_key(path)] = Entry(None, None, (Chunk((), (), FILE),))
        found = file_lengths(checkpoint_id)
        return Manifest(entries, {FILE: found[FILE]}, found)

    def read_tensor(self, checkpoint_id: str, key: str) -> torch.Tensor | None:
        held = {_key(path): value for path, value in _read(checkpoint_id).items()}.get(key)
        return held.clone() if isinstance(held, torch.Tensor) else None

    def size(self, checkpoint_id: str) -> int:
        return sum(file_lengths(checkpoint_id).values())


def _state_dicts(state: dict[str, Any]) -> dict[str, Any]:
    return {name: one.state_dict() if isinstance(one, Stateful) else one for name, one in state.items()}


def _read(checkpoint_id: str) -> dict[_Path, Any]:
    """The leaves of a checkpoint by their paths; tensors are read from the file when they are used."""
    path = Path(checkpoint_id) / FILE
    return dict(_leaves(torch.load(path, map_location="cpu", mmap=True, weights_only=True)))


def _leaves(nested: Any, path: _Path = ()) -> Iterator[tuple[_Path, Any]]:
    """What dictionaries, and lists of dictionaries, hold: as DCP flattens them."""
    if isinstance(nested, dict):
        for key, value in nested.items():
            yield from _leaves(value, (*path, key))
    elif isinstance(nested, list) and any(isinstance(value, dict) for value in nested):
        for number, value in enumerate(nested):
            yield from _leaves(value, (*path, number))
    else:
        yield path, nested


def _key(path: _Path) -> str:
    return ".".join(map(str, path))


def _portable(nested: Any, key: str) -> Any:
    """The same with streams as tensors of their bytes, which `weights_only` reads."""
    if isinstance(nested, dict):
        return {name: _portable(value, f"{key}.{name}") for name, value in nested.items()}
    if isinstance(nested, list):
        return [_portable(value, f"{key}.{number}") for number, value in enumerate(nested)]
    if isinstance(nested, DTensor):
        raise ValueError(f"{key}: torch_save cannot write a sharded tensor")
    if isinstance(nested, io.BytesIO):
        return torch.frombuffer(bytearray(nested.getvalue()), dtype=torch.uint8)
    return nested


def _fill(template: Any, held: dict[_Path, Any], path: _Path) -> None:
    """Put what is held into nested dictionaries and lists of them; tensors in place."""
    for name, value in template.items() if isinstance(template, dict) else enumerate(template):
        below = (*path, name)
        if isinstance(value, dict) or (isinstance(value, list) and any(isinstance(v, dict) for v in value)):
            _fill(value, held, below)
        elif below not in held:
            raise RuntimeError(f"Missing key in checkpoint state_dict: {_key(below)}.")
        elif isinstance(value, torch.Tensor):
            if value.shape != held[below].shape:
                sizes = f"saved {held[below].shape} and current: {value.shape}"
                raise ValueError(f"Size mismatch between {sizes} for {_key(below)}")
            value.copy_(held[below])
        elif isinstance(value, io.BytesIO):
            template[name] = io.BytesIO(held[below].numpy().tobytes())
        else:
            template[name] = held[below]
