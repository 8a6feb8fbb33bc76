"""Digests of tensors, equal if their bits are: ints, computed on their device and scalars until `fetched`."""

from __future__ import annotations

import ctypes
import functools
import zlib
from itertools import accumulate, islice
from typing import Any, Iterator, Mapping

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

Parts = dict[str, dict[str, Any]]
"""Values by name, by kind."""
_CHUNK = 1 << 22
"""How many words are multiplied at a time: a device can have little memory to spare."""
_SMALL = 1 << 14
_MOST_ROWS = 512
_MOST_VALUES = 20_000
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digests(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the digests of tensors by name; of a DTensor that of its shard. One element has the same digest
    on each device: how a checkpoint is loaded decides where an optimizer's `step` is."""
    with temporarily_clear_interpreter_stack():  # a transform such as `grad` wraps what is computed in it
        return _digests(values)


def _digests(values: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = dict.fromkeys(values, 0)
    elsewhere: dict[torch.device, dict[str, torch.Tensor]] = {}
    for name, value in values.items():
        if hasattr(value, "local_shards"):  # of a ShardedTensor, which is not a tensor of its shards' kind
            shards = {str(place): shard.tensor for place, shard in enumerate(value.local_shards())}
            found[name] = sum(_digests(shards).values())
            continue
        if torch.nn.parameter.is_lazy(value):  # it has no values yet
            continue
        tensor = _local(value)
        if tensor.device.type == "meta" or not tensor.numel():
            continue
        tensor = tensor.to_dense() if tensor.layout is not torch.strided else tensor
        tensor = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).contiguous()
        count, size = tensor.numel(), tensor.element_size()
        if tensor.device.type == "cpu" and count > 1:
            found[name] = zlib.crc32((ctypes.c_char * (count * size)).from_address(tensor.data_ptr()), count)
        else:
            elsewhere.setdefault(tensor.device, {})[name] = tensor.view(-1).view(_INTEGERS[size])
    for device, named in elsewhere.items():
        sums = _sums([*named.values()])
        found |= zip(named, torch.stack(sums).tolist() if device.type == "cpu" else sums, strict=True)
    return found


def _sums(tensors: list[torch.Tensor]) -> list[Any]:
    """Return a sum of the words of each tensor on a device. The weight of a word's place is odd, so that each
    change changes the sum. Small tensors are summed together: it takes as long for one as for all."""
    weights = _weights(tensors[0].device)
    small = [words for words in tensors if len(words) <= _SMALL]
    together: Iterator[torch.Tensor] = iter(())
    if small:
        sums = (torch.cat(small) * torch.cat([weights[: len(words)] for words in small])).cumsum(0)
        ends = torch.tensor([*accumulate(map(len, small))], device=weights.device) - 1
        together = iter(sums[ends].diff(prepend=sums.new_zeros(1)).unbind())
    return [
        next(together)
        if len(words) <= _SMALL
        else sum(
            (part * weights[: len(part)]).sum() * (2 * at + 1) for at, part in enumerate(words.split(_CHUNK))
        )
        for words in tensors
    ]


def rows(value: Any) -> dict[str, Any]:
    """Return the digest of each sample of a batch, not fetched yet: of each row of its first tensor that has
    rows; none if there are many, or large ones. Numbers, such as tokens of one text, are no samples."""
    tensors = (_local(leaf) for _, leaf in islice(leaves(value), _MOST_VALUES) if torch.is_tensor(leaf))
    tensor = next((leaf for leaf in tensors if leaf.dim() > 1), None)
    if tensor is None or not 0 < tensor.numel() <= _CHUNK or len(tensor) > _MOST_ROWS:
        return {}
    return digests({str(place): row for place, row in enumerate(tensor)})


def _local(tensor: Any) -> torch.Tensor:
    """Return the shard of a DTensor; of a tensor inside `vmap` that with all of its batch."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor).detach()
    return local


def fetched(parts: Parts) -> Parts:
    """Return parts with digests as ints: one transfer for all, from the device of the first."""
    scalars = [value for values in parts.values() for value in values.values() if torch.is_tensor(value)]
    gathered = [scalar.to(scalars[0].device) for scalar in scalars]
    numbers = iter(torch.stack(gathered).tolist() if scalars else ())
    return {
        kind: {name: next(numbers) if torch.is_tensor(value) else value for name, value in values.items()}
        for kind, values in parts.items()
    }


def is_traced() -> bool:
    """Tell whether a compiler runs the script's code, with values that are not real."""
    keys = torch._C._TorchDispatchModeKey
    return torch.compiler.is_compiling() or any(
        torch._C._get_dispatch_mode(key) is not None for key in (keys.FAKE, keys.FUNCTIONAL, keys.PROXY)
    )


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
    """Return odd numbers, by which words are multiplied before they are added."""
    seeded = torch.Generator().manual_seed(9_176_543)  # the script's generators are not used
    numbers = torch.randint(-(2**62), 2**62, (_CHUNK,), dtype=torch.int64, device="cpu", generator=seeded)
    return (numbers * 2 + 1).to(device)
