"""Full tensors from the parts of a group's ranks, gathered or summed in few collectives."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Generic

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from dcpbench.compare.across_layouts import gathered_values
from dcpbench.core.state import Key, Name
from dcpbench.state.layout import Extent
from dcpbench.state.snapshot import Leaf, Leaves, TensorLeaf, local_part
from dcpbench.torch_private import INDICES, VALUES

_CHUNK = 2**22
"""Number of elements in one all-reduce."""


@dataclass(frozen=True)
class Exchange:
    """The process group in which tensors are exchanged, None for a single rank, and the device that the group
    requires."""

    group: dist.ProcessGroup | None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


@dataclass(frozen=True)
class _Part(Generic[Key]):
    """The part of a tensor that one rank sends on behalf of all ranks that have it."""

    name: Key
    extent: Extent
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.extent.numel * self.dtype.itemsize + 1  # and a byte that is 1 if the rank has the tensor


class Parts(Generic[Key]):
    """The parts that each rank has of each tensor. Its construction is collective; `gather` can be called any
    number of times.

    Args:
        mine: extent and dtype of each part on this rank.
        exchange: the ranks that have the parts.

    Attributes:
        complete: True if every rank has every tensor completely.
        sent: the names of the parts that this rank sends on behalf of all ranks that have them.
    """

    def __init__(self, parts_here: Mapping[Key, tuple[Extent, torch.dtype]], exchange: Exchange) -> None:
        all_ranks = gathered_values(dict(parts_here), exchange.group)
        self._exchange = exchange
        shapes: dict[Key, set[tuple[tuple[int, ...], torch.dtype]]] = {}
        for theirs in all_ranks:
            for name, (extent, dtype) in theirs.items():
                shapes.setdefault(name, set()).add((extent.shape, dtype))
        # Stages of a pipeline can use the same name for different tensors, which are left out.
        names = {name for name, different in shapes.items() if len(different) == 1}
        self.complete = all(
            name in theirs and theirs[name][0].numel == math.prod(theirs[name][0].shape)
            for theirs in all_ranks
            for name in names
        )
        self._mine: dict[Key, tuple[Extent, torch.dtype]] = {
            name: extent_and_dtype for name, extent_and_dtype in parts_here.items() if name in names
        }
        self._sent: list[list[_Part[Key]]] = []
        rank = dist.get_rank(exchange.group) if exchange.group else 0
        taken: set[tuple[Key, Extent]] = set()
        for theirs in all_ranks:
            parts = [_Part(name, *theirs[name]) for name in theirs if name in names]
            parts = [part for part in parts if (part.name, part.extent) not in taken]
            taken |= {(part.name, part.extent) for part in parts}
            self._sent.append([part for part in parts if _has_all_or_some(part.extent)])
        self.sent: frozenset[Key] = frozenset(part.name for part in self._sent[rank])

    @classmethod
    def of(cls, leaves: Mapping[Key, Leaf], exchange: Exchange) -> "Parts[Key]":
        """Return the parts of the tensors among these leaves."""
        parts = {name: leaf for name, leaf in leaves.items() if isinstance(leaf, TensorLeaf)}
        return cls({name: (leaf.extent, leaf.dtype) for name, leaf in parts.items()}, exchange)

    def gather(self, parts_here: Mapping[Key, torch.Tensor]) -> dict[Key, torch.Tensor]:
        """Return each full tensor; collective unless `complete`.

        Args:
            mine: this rank's parts, of any shape; a part can be missing. If several ranks have the same part,
                the result contains this rank's part.
        """
        tensors = {} if self.complete else self._gather_of_others(parts_here)
        for name, tensor in parts_here.items():
            if name in self._mine and _has_all_or_some(extent := self._mine[name][0]):
                into = tensors.setdefault(name, tensor.new_empty(extent.shape))
                extent.put(into, tensor.to(into.device))
        return tensors

    def _gather_of_others(self, parts_here: Mapping[Key, torch.Tensor]) -> dict[Key, torch.Tensor]:
        sizes = [sum(part.nbytes for part in parts) for parts in self._sent]
        device, group = self._exchange.device, self._exchange.group
        rank = dist.get_rank(group) if group else 0
        buffer = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
        for part, there, elements in _places(self._sent[rank], buffer):
            if part.name in parts_here:
                there.fill_(1)
                elements.copy_(parts_here[part.name].contiguous().view(-1).view(torch.uint8))
        buffers = [torch.empty_like(buffer) for _ in sizes] if group else [buffer]
        if group:
            dist.all_gather(buffers, buffer, group=group)
        tensors: dict[Key, torch.Tensor] = {}
        for parts, received in zip(self._sent, buffers, strict=True):
            for part, there, elements in _places(parts, received):
                if bool(there.item()):
                    empty = torch.zeros(part.extent.shape, dtype=part.dtype, device=device)
                    # A view of another dtype has to be aligned.
                    part.extent.put(tensors.setdefault(part.name, empty), elements.clone().view(part.dtype))
        return tensors


def _has_all_or_some(extent: Extent) -> bool:
    """Return whether the part has an element, or the full tensor has none."""
    return extent.numel > 0 or math.prod(extent.shape) == 0


def _places(
    parts: Sequence[_Part[Key]], buffer: torch.Tensor
) -> Iterator[tuple[_Part[Key], torch.Tensor, torch.Tensor]]:
    """Yield the place of each part in a buffer: the byte that is 1 if it is present, and its elements."""
    begin = 0
    for part in parts:
        yield part, buffer[begin : begin + 1], buffer[begin + 1 : begin + part.nbytes]
        begin += part.nbytes


def assembled(leaves: Leaves, exchange: Exchange) -> dict[Name, torch.Tensor]:
    """Return the full tensors of the parts that ranks have; collective. An element that no rank has is 0."""
    tensors = {name: leaf.local for name, leaf in leaves.items() if isinstance(leaf, TensorLeaf)}
    return Parts.of(leaves, exchange).gather(tensors)


def summed(
    names: Sequence[str],
    tensors: Mapping[str, Sequence[torch.Tensor]],
    shapes: Mapping[str, int],
    count: int,
    exchange: Exchange,
) -> Iterator[tuple[str, bool, list[torch.Tensor]]]:
    """Sum tensors over the ranks in float64, several at a time; collective.

    Args:
        names: names of the tensors, the same on every rank.
        tensors: this rank's terms, `count` tensors by name; names can be missing.
        shapes: number of elements of each of these tensors, by name.
        count: number of tensors for each name.

    Yields:
        each name, whether any rank had terms, and the `count` sums, each of shape (elements,).
    """
    chunks: list[list[str]] = [[]]
    for name in names:
        if chunks[-1] and sum(shapes[named] for named in (*chunks[-1], name)) > _CHUNK:
            chunks.append([])
        chunks[-1].append(name)
    for chunk in filter(None, chunks):
        sizes = [count * shapes[name] for name in chunk]
        terms = [tensors.get(name) or [torch.zeros(size)] for name, size in zip(chunk, sizes, strict=True)]
        present = torch.tensor([float(name in tensors) for name in chunk])
        parts = [*itertools.chain(*terms), present]
        total = torch.cat([term.reshape(-1).to(exchange.device, torch.float64) for term in parts])
        if exchange.group:
            dist.all_reduce(total, group=exchange.group)
        *sums, numbers = total.split([*sizes, len(chunk)])
        for name, full_sum, number in zip(chunk, sums, numbers.tolist(), strict=True):
            yield name, number > 0, [*full_sum.chunk(count)] if shapes[name] else []


def real_elements(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of the elements in float64; real and imaginary parts alternate."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.reshape(-1).double()


def magnitudes(gradient: torch.Tensor) -> torch.Tensor:
    """Return the magnitudes of the elements of a gradient, in float64; if a sparse one has a row several
    times, their sum, as many times: the error of a sum grows with its terms."""
    if not gradient.is_sparse or gradient.is_complex():
        return real_elements(dense(gradient)).abs()
    values = VALUES.of(gradient)().double()
    row_sums = partial(torch.sparse_coo_tensor, INDICES.of(gradient)(), size=gradient.shape)
    size, times = (
        row_sums(elements, check_invariants=False) for elements in (values.abs(), torch.ones_like(values))
    )
    return real_elements(size.to_dense() * times.to_dense())


def local_gradient(gradient: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a gradient, dense and reduced."""
    if isinstance(gradient, DTensor) and any(placement.is_partial() for placement in gradient.placements):
        full = [Replicate() if placement.is_partial() else placement for placement in gradient.placements]
        gradient = gradient.redistribute(placements=full)
    return local_part(dense(gradient))


def dense(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient that is not sparse."""
    return gradient.to_dense() if gradient.is_sparse else gradient
