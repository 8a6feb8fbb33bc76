"""Where a rank's part of a tensor lies in the whole of it, under any parallelism."""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


@dataclass(frozen=True)
class Extent:
    """A rank's part of a tensor: `numel` elements, in row-major order from element `start` on, of the
    box of size `box` at `offset` in the tensor of shape `shape`.

    A DTensor's shard is a whole box. FSDP1 cuts a flattened parameter anywhere, so that its parts
    begin and end within a box: the parameter's own, or with tensor parallelism the TP shard's.
    """

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    box: tuple[int, ...]
    start: int
    numel: int

    def global_index(self, local: int) -> list[int]:
        """The index in the whole tensor of this part's element number `local`."""
        within = torch.unravel_index(torch.tensor(self.start + local), self.box)
        return [int(index) + begin for index, begin in zip(within, self.offset, strict=True)]

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        """What a tensor of shape `shape` has at this part's place, as a tensor of shape (numel,)."""
        for dimension, (begin, size) in enumerate(zip(self.offset, self.box, strict=True)):
            whole = whole.narrow(dimension, begin, size)
        return whole.reshape(-1)[self.start : self.start + self.numel]

    def put(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        """Copy a part, of any shape, to its place in a tensor of shape `shape`."""
        for dimension, (begin, size) in enumerate(zip(self.offset, self.box, strict=True)):
            whole = whole.narrow(dimension, begin, size)
        if self.numel < math.prod(self.box):
            box = whole.reshape(-1)  # a copy, unless it is contiguous
            box[self.start : self.start + self.numel] = part.reshape(-1)
            part = box
        whole.copy_(part.reshape(self.box))


def whole(tensor: torch.Tensor) -> Extent:
    """The extent of a tensor that a rank has all of."""
    shape = tuple(tensor.shape)
    return Extent(shape, (0,) * len(shape), shape, 0, tensor.numel())


def extent_of(tensor: torch.Tensor) -> Extent:
    """The extent of a DTensor's shard, or of a tensor that is not one."""
    if not isinstance(tensor, DTensor):
        return whole(tensor)
    return _shard(tuple(tensor.shape), tensor.device_mesh, tensor.placements)


@functools.cache
def _shard(shape: tuple[int, ...], mesh: DeviceMesh, placements: tuple[Placement, ...]) -> Extent:
    box, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
    return Extent(shape, tuple(offset), tuple(box), 0, math.prod(box))


Extents = dict[int, Extent]
"""Those of parameters, by the `id` of each."""


def parameter_extents(model: nn.Module) -> Extents:
    """The extent of every parameter."""
    extents = {id(parameter): extent_of(parameter) for parameter in model.parameters()}
    extents.update(_fsdp1_extents(model))
    return extents


def _fsdp1_extents(model: nn.Module) -> Iterator[tuple[int, Extent]]:
    """FSDP1 keeps a rank's parts as views into one flat parameter, and where they lie beside it.

    The attributes are private to torch, and the only place that has it: `FlatParameter` in
    torch/distributed/fsdp/_flat_param.py describes them.
    """
    for module in FullyShardedDataParallel.fsdp_modules(model):
        handle = module._handle
        if handle is None or not handle.uses_sharded_strategy:
            continue
        flat = handle.flat_param
        described = zip(
            flat._params or (), flat._shapes, flat._shard_param_infos, flat._param_extensions, strict=True
        )
        for parameter, shape, part, spec in described:
            box, offset, outer = tuple(shape), (0,) * len(shape), tuple(shape)
            if spec is not None:  # the DTensorSpec of a parameter that TP had sharded before
                outer = tuple(spec.shape)
                box, offset = compute_local_shape_and_global_offset(outer, spec.mesh, spec.placements)
            start, numel = part.intra_param_start_idx or 0, part.numel_in_shard or 0
            yield id(parameter), Extent(outer, tuple(offset), tuple(box), start, numel)
