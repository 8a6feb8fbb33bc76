"""States of tensors alone, for formats that hold nothing else: each other value as a tensor of its bytes."""

import io
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.stateful import Stateful

from dcpbench.checkpointers.nested import is_gone_into
from dcpbench.verify.audit import Entry

Change = Callable[[Any, str], Any]
"""What becomes of a value that has this flattened key."""


def of_tensors(state: dict[str, Any], stored: Mapping[str, Entry] | None = None) -> dict[str, Any]:
    """The same state to be saved, or to be loaded from a checkpoint that has `stored` these entries: a load
    fills tensors that are there, and how many bytes a value takes up the checkpoint alone knows."""
    return {
        name: _TensorsOnly(name, held, stored or {}) if isinstance(held, dict | Stateful) else held
        for name, held in state.items()
    }


class _TensorsOnly:
    """A `Stateful` that stands for another one, or for a dictionary, and whose state dict has no other
    values than tensors."""

    def __init__(self, name: str, held: Any, stored: Mapping[str, Entry]) -> None:
        self._name, self._held, self._stored = name, held, stored

    def state_dict(self) -> dict[str, Any]:
        self._given = self._held.state_dict() if isinstance(self._held, Stateful) else self._held
        packed: dict[str, Any] = _changed(self._given, self._packed, self._name)
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        filled: dict[str, Any] = {}
        _changed(state_dict, lambda value, key: filled.setdefault(key, value), self._name)
        loaded = _changed(self._given, lambda value, key: unpacked(filled[key], like=value), self._name)
        if isinstance(self._held, Stateful):
            self._held.load_state_dict(loaded)
        else:
            self._held.update(loaded)

    def _packed(self, value: Any, key: str) -> torch.Tensor:
        if isinstance(value, torch.Tensor):
            return value
        if (entry := self._stored.get(key)) and entry.shape is not None:
            return torch.empty(entry.shape, dtype=torch.uint8)
        return packed(value)


def packed(value: Any) -> torch.Tensor:
    """A value that is no tensor as the tensor (n,) of its bytes, uint8."""
    if isinstance(value, io.BytesIO):
        stream = value
    else:
        torch.save(value, stream := io.BytesIO())
    return torch.frombuffer(bytearray(stream.getvalue()), dtype=torch.uint8)


def unpacked(held: torch.Tensor, like: Any) -> Any:
    """What `packed` has made a tensor of bytes of, or a tensor; `like` is of the kind that it is."""
    if isinstance(like, torch.Tensor):
        return held
    stream = io.BytesIO(held.numpy().tobytes())
    return stream if isinstance(like, io.BytesIO) else torch.load(stream, weights_only=True)


def _changed(nested: Any, change: Change, key: str) -> Any:
    """The same with every value in it changed."""
    if isinstance(nested, dict):
        return {name: _changed(value, change, f"{key}.{name}") for name, value in nested.items()}
    if is_gone_into(nested):
        return [_changed(value, change, f"{key}.{number}") for number, value in enumerate(nested)]
    return change(nested, key)
