"""Digests of tensors, equal if their bits are: ints, computed on their device and scalars until `fetched`."""

from __future__ import annotations

import ctypes
import functools
import zlib
from itertools import accumulate, groupby, islice
from typing import Any, Iterator, Mapping

import torch

Parts = dict[str, dict[str, Any]]
"""Values by name, by kind."""
_ROW = 1 << 12
_CHUNK = 1 << 22
"""About how many words are copied at a time: a device can have little memory to spare."""
_MOST_ROWS = 1 << 20
_MOST_VALUES = 20_000
_INTEGERS = {1: torch.uint8, 2: torch.int16}


def digests(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the digests of tensors by name; of a DTensor that of its shard."""
    found: dict[str, Any] = dict.fromkeys(values, 0)
    alike: dict[Any, dict[str, torch.Tensor]] = {}
    for name, value in values.items():
        tensor = getattr(value, "_local_tensor", value).detach()
        if tensor.device.type == "meta" or not tensor.numel():
            continue
        tensor = tensor.to_dense() if tensor.layout is not torch.strided else tensor
        tensor = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).contiguous()
        count, size = tensor.numel(), tensor.element_size()
        if tensor.device.type == "cpu":
            found[name] = zlib.crc32((ctypes.c_char * (count * size)).from_address(tensor.data_ptr()), count)
        else:
            words = tensor.view(-1).view(_INTEGERS.get(size, torch.int32))
            alike.setdefault((words.device, words.dtype), {})[name] = words
    for named in alike.values():
        found |= zip(named, _sums([*named.values()]).unbind(), strict=True)
    return found


def _sums(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return a sum of the words of each tensor, with kernels for many tensors at a time: rows, padded with
    zeros. A word has the weights of its column and row, which are odd: each change changes the sum."""
    weights = _weights(tensors[0].device)
    columns, zeros = weights[:_ROW].int(), tensors[0].new_zeros(_ROW)
    chunks = [chunk for words in tensors for chunk in words.split(_CHUNK)]
    sums = []
    ends = zip(accumulate(map(len, chunks)), chunks, strict=True)
    for _, batch in groupby(ends, lambda end: end[0] // _CHUNK):
        padded = [part for _, chunk in batch for part in (chunk, zeros[: -len(chunk) % _ROW])]
        sums.append((torch.cat(padded).view(-1, _ROW) * columns).sum(1))
    rows = [-(-len(words) // _ROW) for words in tensors]
    totals = (torch.cat(sums) * torch.cat([weights[:count] for count in rows])).cumsum(0)
    lasts = torch.tensor([*accumulate(rows)], device=weights.device) - 1
    return totals[lasts].diff(prepend=totals.new_zeros(1))


def fetched(parts: Parts) -> Parts:
    """Return parts with digests as ints: one transfer for all, from the device of the first."""
    scalars = [value for values in parts.values() for value in values.values() if torch.is_tensor(value)]
    gathered = [scalar.to(scalars[0].device) for scalar in scalars]
    numbers = iter(torch.stack(gathered).tolist() if scalars else ())
    return {
        kind: {name: next(numbers) if torch.is_tensor(value) else value for name, value in values.items()}
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
        for key, inner in entries.items() if isinstance(entries, Mapping) else ():
            yield from leaves(inner, f"{name}.{key}" if name else str(key))


def held(value: Any) -> dict[str, Any]:
    """Return the digests of tensors, not fetched yet, and other plain values as texts, by name."""
    named = dict(islice(leaves(value), _MOST_VALUES))
    tensors = digests({name: leaf for name, leaf in named.items() if torch.is_tensor(leaf)})
    return {name: tensors[name] if name in tensors else f"={leaf!r}"[:100] for name, leaf in named.items()}


@functools.cache
def _weights(device: torch.device) -> torch.Tensor:
    """Return odd numbers: the weights of rows, and of columns."""
    seeded = torch.Generator().manual_seed(9_176_543)  # the script's generators are not used
    numbers = torch.randint(-(2**62), 2**62, (_MOST_ROWS,), dtype=torch.int64, device="cpu", generator=seeded)
    return (numbers * 2 + 1).to(device)
