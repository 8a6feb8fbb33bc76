"""Digests of tensors, computed where they are stored. Those of a device are fetched together.

A digest tells whether two tensors have the same bits. It is an int, or a scalar on a device until `fetched`.
"""

from __future__ import annotations

import ctypes
import zlib
from itertools import islice
from typing import Any, Iterator, Sequence

_CHUNK = 1 << 22
_MOST = 2000
_weights: dict[Any, Any] = {}


def digest(tensor: Any) -> Any:
    """Return the digest of a tensor; of a DTensor that of its shard."""
    tensor = getattr(tensor, "_local_tensor", tensor).detach()
    if tensor.device.type == "meta":
        return 0
    if tensor.layout is not _torch().strided:
        tensor = tensor.to_dense()
    if tensor.device.type != "cpu":
        return _on_device(tensor)
    tensor = tensor.contiguous()
    count = tensor.numel()
    size = count * tensor.element_size()
    return zlib.crc32((ctypes.c_char * size).from_address(tensor.data_ptr()), count) if size else 0


def fetched(digests: Sequence[Any]) -> list[Any]:
    """Return digests as ints: one transfer for all that are on one device."""
    by_device: dict[Any, list[Any]] = {}
    for value in digests:
        if not isinstance(value, (int, str, float)):
            by_device.setdefault(value.device, []).append(value)
    transferred = {device: iter(_torch().stack(of).tolist()) for device, of in by_device.items()}
    return [
        value if isinstance(value, (int, str, float)) else next(transferred[value.device])
        for value in digests
    ]


def leaves(value: Any, name: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield the tensors, numbers and texts in nested containers by their paths; objects that are neither
    are left out, or represented by their `state_dict`."""
    torch = _torch()
    if isinstance(value, (torch.Tensor, bool, int, float, str)) or value is None:
        yield name, value
    elif depth > 8:
        return
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, f"{name}.{key}" if name else str(key), depth + 1)
    elif isinstance(value, (list, tuple)):
        if len(value) > 64 and not any(isinstance(inner, torch.Tensor) for inner in value[:8]):
            yield name, repr(value)
            return
        for number, inner in enumerate(value):
            yield from leaves(inner, f"{name}[{number}]", depth + 1)
    elif isinstance(value, torch.nn.Module) or hasattr(value, "state_dict"):
        yield from leaves(value.state_dict(), name, depth + 1)


def held(value: Any) -> list[tuple[str, Any]]:
    """Return the digests of tensors, not fetched yet, and other plain values as texts, by name."""
    is_tensor = _torch().is_tensor
    return [
        (name, digest(leaf) if is_tensor(leaf) else _text_of(leaf))
        for name, leaf in islice(leaves(value), _MOST)
    ]


def _text_of(value: Any) -> str:
    text = repr(value)
    return f"={text}" if len(text) < 100 else f"={zlib.crc32(text.encode())}"


def _on_device(tensor: Any) -> Any:
    torch = _torch()
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    words = tensor.contiguous().view(-1).view(integers[tensor.element_size()])
    total = torch.full((), words.numel(), dtype=torch.int64, device=words.device)
    if words.device not in _weights:
        seeded = torch.Generator().manual_seed(9_176_543)  # the script's generators are not used
        random = torch.randint(-(2**62), 2**62, (_CHUNK,), dtype=torch.int64, generator=seeded) * 2 + 1
        _weights[words.device] = random.to(words.device)
    for begin in range(0, words.numel(), _CHUNK):
        part = words[begin : begin + _CHUNK]
        total = total * 6_364_136_223_846_793_005 + (part * _weights[words.device][: part.numel()]).sum()
    return total


def _torch() -> Any:
    import torch

    return torch
