"""Digests of tensors, computed where they are stored. Those of a device are fetched together.

A digest tells whether two tensors have the same bits. It is an int, or a scalar on a device until `fetched`.
"""

from __future__ import annotations

import ctypes
import zlib
from itertools import islice
from typing import Any, Iterator

import torch

Parts = dict[str, dict[str, Any]]
"""Values by name, by kind."""
_CHUNK = 1 << 22
_MOST = 2000
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_weights: dict[torch.device, torch.Tensor] = {}


def digest(tensor: Any) -> Any:
    """Return the digest of a tensor; of a DTensor that of its shard."""
    tensor = getattr(tensor, "_local_tensor", tensor).detach()
    if tensor.device.type == "meta":
        return 0
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.device.type != "cpu":
        return _on_device(tensor)
    tensor = tensor.contiguous()
    count = tensor.numel()
    size = count * tensor.element_size()
    return zlib.crc32((ctypes.c_char * size).from_address(tensor.data_ptr()), count) if size else 0


def fetched(parts: Parts) -> Parts:
    """Return parts with digests as ints: one transfer for all that are on one device."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for values in parts.values():
        for value in values.values():
            if isinstance(value, torch.Tensor):
                by_device.setdefault(value.device, []).append(value)
    numbers = {device: iter(torch.stack(scalars).tolist()) for device, scalars in by_device.items()}
    return {
        kind: {
            name: next(numbers[value.device]) if isinstance(value, torch.Tensor) else value
            for name, value in values.items()
        }
        for kind, values in parts.items()
    }


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the tensors, numbers and texts in nested containers by their paths; objects that are neither
    are left out, or represented by their `state_dict`."""
    if isinstance(value, (torch.Tensor, bool, int, float, str)) or value is None:
        yield name, value
    else:
        if hasattr(value, "state_dict"):
            value = value.state_dict()
        entries = dict(enumerate(value)) if isinstance(value, (list, tuple)) else value
        for key, inner in entries.items() if isinstance(entries, dict) else ():
            yield from leaves(inner, f"{name}.{key}" if name else str(key))


def held(value: Any) -> dict[str, Any]:
    """Return the digests of tensors, not fetched yet, and other plain values as texts, by name."""
    return {
        name: digest(leaf) if torch.is_tensor(leaf) else _text_of(leaf)
        for name, leaf in islice(leaves(value), _MOST)
    }


def _text_of(value: Any) -> str:
    text = repr(value)
    return f"={text}" if len(text) < 100 else f"={zlib.crc32(text.encode())}"


def _on_device(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    words = tensor.contiguous().view(-1).view(_INTEGERS[tensor.element_size()])
    total = torch.full((), words.numel(), dtype=torch.int64, device=words.device)
    if words.device not in _weights:
        seeded = torch.Generator().manual_seed(9_176_543)  # the script's generators are not used
        random = torch.randint(-(2**62), 2**62, (_CHUNK,), dtype=torch.int64, generator=seeded) * 2 + 1
        _weights[words.device] = random.to(words.device)
    for begin in range(0, words.numel(), _CHUNK):
        part = words[begin : begin + _CHUNK]
        total = total * 6_364_136_223_846_793_005 + (part * _weights[words.device][: part.numel()]).sum()
    return total
