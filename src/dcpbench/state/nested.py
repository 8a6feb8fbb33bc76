"""State dicts that a checkpoint can fill, and states for formats that can store only tensors, in which every
other value becomes a tensor of its bytes."""

import io
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.stateful import Stateful

from dcpbench.core.state import Name, text_of
from dcpbench.formats.audit import Entry
from dcpbench.state.snapshot import flattened, map_leaves


def state_dicts(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state dicts of a state's objects, by their names."""
    return {
        name: holder.state_dict() if isinstance(holder, Stateful) else holder
        for name, holder in state.items()
    }


def check_fits(stored: Mapping[str, Any], nested: Any) -> None:
    """Check that a checkpoint, given by its flattened keys, can fill these state dicts. Messages about keys
    and shapes are DCP's, which converts to another dtype.

    Raises:
        RuntimeError: a key is missing in the checkpoint.
        ValueError: a tensor has a different shape or dtype, or the checkpoint has no tensor.
    """
    for key, template in flattened(nested).items():
        if key not in stored:
            raise RuntimeError(f"Missing key in checkpoint state_dict: {key}.")
        saved = stored[key]
        if not isinstance(template, torch.Tensor):
            continue
        if not isinstance(saved, torch.Tensor):
            raise ValueError(f"Type mismatch between saved {type(saved).__name__} and a tensor for {key}")
        if template.shape != saved.shape:
            sizes = f"saved {saved.shape} and current: {template.shape}"
            raise ValueError(f"Size mismatch between {sizes} for {key}")
        if template.dtype != saved.dtype:
            raise ValueError(f"Dtype mismatch between saved {saved.dtype} and {template.dtype} for {key}")


def of_tensors(state: dict[str, Any], stored: Mapping[str, Entry] | None = None) -> dict[str, Any]:
    """Return a state that contains only tensors, to be saved, or loaded from a checkpoint with these entries:
    a load fills existing tensors, and only the checkpoint knows the number of bytes of a value."""
    return {
        name: _TensorsOnly(name, holder, stored or {}) if isinstance(holder, Mapping | Stateful) else holder
        for name, holder in state.items()
    }


class _TensorsOnly:
    """A `Stateful` that wraps another one, or a dictionary, and whose state dict contains only tensors."""

    def __init__(self, name: str, wrapped: Any, stored: Mapping[str, Entry]) -> None:
        self._name, self._wrapped, self._stored = name, wrapped, stored

    def state_dict(self) -> dict[str, Any]:
        self._given = self._wrapped.state_dict() if isinstance(self._wrapped, Stateful) else self._wrapped
        tensors: dict[str, Any] = map_leaves(self._given, self._packed, (self._name,))
        return tensors

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        filled = flattened(state_dict)
        loaded = map_leaves(self._given, lambda value, name: unpacked(filled[text_of(name)], like=value))
        if isinstance(self._wrapped, Stateful):
            self._wrapped.load_state_dict(loaded)
        else:
            self._wrapped.update(loaded)

    def _packed(self, value: Any, name: Name) -> torch.Tensor:
        if isinstance(value, torch.Tensor):
            return value
        if (stored := self._stored.get(text_of(name))) and stored.shape is not None:
            return torch.empty(stored.shape, dtype=torch.uint8)
        return packed(value)


def packed(value: Any) -> torch.Tensor:
    """Return a value that is not a tensor as the tensor of its n bytes, shape (n,), dtype uint8."""
    if isinstance(value, io.BytesIO):
        stream = value
    else:
        torch.save(value, stream := io.BytesIO())
    return torch.frombuffer(bytearray(stream.getvalue()), dtype=torch.uint8)


def unpacked(stored: torch.Tensor, like: Any) -> Any:
    """Invert `packed`, or return the tensor, depending on the type of `like`."""
    if isinstance(like, torch.Tensor):
        return stored
    stream = io.BytesIO(stored.numpy().tobytes())
    return stream if isinstance(like, io.BytesIO) else torch.load(stream, weights_only=True)
