"""Whole tensors from the parts that the ranks of a group have: gathered, or summed, in few collectives."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from dcpbench.verify.compare_layouts import gathered
from dcpbench.verify.layout import Extent
from dcpbench.verify.snapshot import Leaves, TensorLeaf

_CHUNK = 2**22
"""Elements that one all-reduce sums."""


@dataclass(frozen=True)
class Exchange:
    """The process group that tensors are exchanged in, None for a rank alone, and the device on which they
    have to be for that."""

    group: dist.ProcessGroup | None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


@dataclass(frozen=True)
class _Part:
    """The part of a tensor that one rank sends for all that have it."""

    name: str
    extent: Extent
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.extent.numel * self.dtype.itemsize + 1  # and whether there is such a tensor


class Parts:
    """Which rank has which part of each tensor; made once, collectively, for any number of `gather`.

    Args:
        mine: the extent and the dtype of each part on this rank.
        exchange: the ranks that have the parts.

    Attributes:
        complete: whether every rank has all of each tensor.
    """

    def __init__(self, mine: Mapping[str, tuple[Extent, torch.dtype]], exchange: Exchange) -> None:
        everybody = gathered(dict(mine), exchange.group)
        self._exchange = exchange
        shapes: dict[str, set[tuple[tuple[int, ...], torch.dtype]]] = {}
        for theirs in everybody:
            for name, (extent, dtype) in theirs.items():
                shapes.setdefault(name, set()).add((extent.shape, dtype))
        # Stages of a pipeline may give the same name to different tensors: nothing is made of those.
        names = {name for name, different in shapes.items() if len(different) == 1}
        self.complete = all(
            name in theirs and theirs[name][0].numel == math.prod(theirs[name][0].shape)
            for theirs in everybody
            for name in names
        )
        self._mine = {name: part for name, part in mine.items() if name in names}
        self._sent: list[list[_Part]] = []
        taken: set[tuple[str, Extent]] = set()
        for theirs in everybody:
            own = [_Part(name, *theirs[name]) for name in theirs if name in names]
            own = [part for part in own if (part.name, part.extent) not in taken]
            taken |= {(part.name, part.extent) for part in own}
            self._sent.append([part for part in own if part.extent.numel])

    @classmethod
    def of(cls, leaves: Leaves, exchange: Exchange) -> "Parts":
        """Those of the tensors among these leaves."""
        parts = {name: leaf for name, leaf in leaves.items() if isinstance(leaf, TensorLeaf)}
        return cls({name: (leaf.extent, leaf.dtype) for name, leaf in parts.items()}, exchange)

    def gather(self, mine: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return each tensor that any rank has, whole; collective, unless every rank has all of each.

        Args:
            mine: this rank's parts, of any shape; a rank need not have one that others have. Where several
                ranks have the same part, this rank's own is in what it gets.
        """
        tensors = {} if self.complete else self._gather_of_others(mine)
        for name, part in mine.items():
            if name in self._mine and (extent := self._mine[name][0]).numel:
                into = tensors.setdefault(name, part.new_empty(extent.shape))
                extent.put(into, part.to(into.device))
        return tensors

    def _gather_of_others(self, mine: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        sizes = [sum(part.nbytes for part in parts) for parts in self._sent]
        device, group = self._exchange.device, self._exchange.group
        rank = dist.get_rank(group) if group else 0
        buffer = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
        for part, there, elements in _places(self._sent[rank], buffer):
            if part.name in mine:
                there.fill_(1)
                elements.copy_(mine[part.name].contiguous().view(-1).view(torch.uint8))
        buffers = [torch.empty_like(buffer) for _ in sizes] if group else [buffer]
        if group:
            dist.all_gather(buffers, buffer, group=group)
        tensors: dict[str, torch.Tensor] = {}
        for parts, received in zip(self._sent, buffers, strict=True):
            for part, there, elements in _places(parts, received):
                if bool(there.item()):
                    empty = torch.zeros(part.extent.shape, dtype=part.dtype, device=device)
                    # A view of another dtype has to begin where one of its elements may.
                    part.extent.put(tensors.setdefault(part.name, empty), elements.clone().view(part.dtype))
        return tensors


def _places(
    parts: Sequence[_Part], buffer: torch.Tensor
) -> Iterator[tuple[_Part, torch.Tensor, torch.Tensor]]:
    """Where each part lies in a buffer: the byte that says whether it is there, and its elements."""
    begin = 0
    for part in parts:
        yield part, buffer[begin : begin + 1], buffer[begin + 1 : begin + part.nbytes]
        begin += part.nbytes


def assembled(leaves: Leaves, exchange: Exchange) -> dict[str, torch.Tensor]:
    """Return the whole tensors of the parts that ranks have; collective. An element that no rank has is 0."""
    tensors = {name: leaf.local for name, leaf in leaves.items() if isinstance(leaf, TensorLeaf)}
    return Parts.of(leaves, exchange).gather(tensors)


def summed(
    names: Sequence[str],
    tensors: Mapping[str, Sequence[torch.Tensor]],
    shapes: Mapping[str, int],
    count: int,
    exchange: Exchange,
) -> Iterator[tuple[str, bool, list[torch.Tensor]]]:
    """Sum tensors over the ranks in float64, some at a time; collective.

    Args:
        names: of what is summed, the same on every rank.
        tensors: this rank's terms: `count` tensors of as many elements as `shapes` says under each name that
            it has any of.
        shapes: how many elements there are under each name.
        count: how many tensors there are under each name.

    Yields:
        each name, whether any rank had terms, and the `count` sums, each of shape (elements,).
    """
    chunks: list[list[str]] = [[]]
    for name in names:
        if chunks[-1] and sum(shapes[one] for one in (*chunks[-1], name)) > _CHUNK:
            chunks.append([])
        chunks[-1].append(name)
    for chunk in filter(None, chunks):
        sizes = [count * shapes[name] + 1 for name in chunk]
        total = torch.zeros(sum(sizes), dtype=torch.float64, device=exchange.device)
        for name, part in zip(chunk, total.split(sizes), strict=True):
            if terms := tensors.get(name):
                part[-1] = 1
                part[:-1].copy_(torch.cat([one.reshape(-1) for one in terms]))
        if exchange.group:
            dist.all_reduce(total, group=exchange.group)
        for name, part in zip(chunk, total.split(sizes), strict=True):
            yield name, bool(part[-1].item()), [*part[:-1].chunk(count)] if shapes[name] else []


def summed_numbers(numbers: Sequence[float], exchange: Exchange) -> list[float]:
    """Sum numbers over the ranks, each with its counterparts; collective."""
    total = torch.tensor(numbers, dtype=torch.float64, device=exchange.device)
    if exchange.group:
        dist.all_reduce(total, group=exchange.group)
    found: list[float] = total.tolist()
    return found


def any_rank(value: bool, exchange: Exchange) -> bool:
    """Whether this is true of any rank; collective."""
    return summed_numbers([value], exchange) != [0.0]


def real_elements(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor in float64, real and imaginary parts one after the other; not a view."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.reshape(-1).double()
