"""The position of a rank's part in the full tensor, under any parallelism."""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Placement

from dcpbench import torch_private as private


@dataclass(frozen=True)
class Extent:
    """A rank's part of a tensor: `numel` elements, in row-major order from element `start` on, of the box of
    size `box` at `offset` in the tensor of shape `shape`.

    A DTensor's shard is a complete box. FSDP1 cuts a flattened parameter anywhere, so that its parts begin
    and end within a box: that of the parameter, or with tensor parallelism that of the TP shard. It flattens
    in memory order: `order` has the dimensions of the box from the slowest on, if they are not in row-major
    order, as in channels_last.
    """

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    box: tuple[int, ...]
    start: int
    numel: int
    order: tuple[int, ...] = ()

    def global_index(self, local: int) -> list[int]:
        """Return the index in the full tensor of element number `local` of this part."""
        order = self.order or range(len(self.box))
        sizes = [self.box[dimension] for dimension in order]
        within = torch.unravel_index(torch.tensor(self.start + local), sizes)
        at = dict(zip(order, within, strict=True))
        return [int(at[number]) + begin for number, begin in zip(range(len(at)), self.offset, strict=True)]

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this part of a full tensor, shape (numel,)."""
        return self.take_of_box(self._box_in(whole))

    def take_of_box(self, box: torch.Tensor) -> torch.Tensor:
        """Return this part of its box, shape (numel,)."""
        return self._in_order(box).reshape(-1)[self.start : self.start + self.numel]

    def _box_in(self, whole: torch.Tensor) -> torch.Tensor:
        for dimension, (begin, size) in enumerate(zip(self.offset, self.box, strict=True)):
            whole = whole.narrow(dimension, begin, size)
        return whole

    def _in_order(self, box: torch.Tensor) -> torch.Tensor:
        return box.permute(self.order) if self.order else box

    def put(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        """Copy this part, of any shape, into a full tensor."""
        whole = self._in_order(self._box_in(whole))
        if self.numel < math.prod(self.box):
            box = whole.reshape(-1)  # a copy, unless it is contiguous
            box[self.start : self.start + self.numel] = part.reshape(-1)
            part = box
        whole.copy_(part.reshape(whole.shape))


def whole(tensor: torch.Tensor) -> Extent:
    """Return the extent of a tensor that is not sharded."""
    return _whole(tuple(tensor.shape))


@functools.cache
def _whole(shape: tuple[int, ...]) -> Extent:
    return Extent(shape, (0,) * len(shape), shape, 0, math.prod(shape))


def extent_of(tensor: torch.Tensor) -> Extent:
    """Return the extent of a DTensor's shard, or of a plain tensor."""
    if not isinstance(tensor, DTensor):
        return whole(tensor)
    return _shard(tuple(tensor.shape), tensor.device_mesh, tensor.placements)


@functools.cache
def _shard(shape: tuple[int, ...], mesh: DeviceMesh, placements: tuple[Placement, ...]) -> Extent:
    box, offset = private.LOCAL_SHAPE_AND_OFFSET.value(shape, mesh, placements)
    return Extent(shape, tuple(offset), tuple(box), 0, math.prod(box))


@dataclass(frozen=True, eq=False)
class ParameterPart:
    """This rank's part of a parameter. The optimizer has it as `parameter`; if that is a flat parameter,
    which FSDP1 concatenates from several, the part is its elements at `place`."""

    parameter: nn.Parameter
    extent: Extent
    place: slice | None = None

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the part of a tensor with the layout of `parameter`: itself, its gradient, a moment."""
        return tensor if self.place is None else tensor[self.place]


def called_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules that are called: the model, or each entry of a dictionary of them."""
    return [*model.values()] if is_dictionary(model) else [model]


def is_dictionary(model: nn.Module) -> TypeGuard[nn.ModuleDict]:
    """Return whether a model is a dictionary of modules, which cannot be called."""
    return isinstance(model, nn.ModuleDict) and type(model).forward is nn.Module.forward


ParameterParts = dict[str, ParameterPart]
"""Parts by name. Tied parameters have a part under each of their names."""


def parameter_parts(model: nn.Module) -> ParameterParts:
    """Return the part of every parameter, by its name in `model.named_parameters()`, or the name that it had
    before it became part of a flat parameter."""
    fsdp1 = {id(parameter): parts for parameter, parts in _fsdp1_parts(model)}
    parts: ParameterParts = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) not in fsdp1:
            fsdp1[id(parameter)] = {"": ParameterPart(parameter, extent_of(parameter))}
        for below, part in fsdp1[id(parameter)].items():
            parts[f"{name.removesuffix(private.FLAT_PARAMETER.value)}{below}" if below else name] = part
    return parts


def _fsdp1_parts(model: nn.Module) -> Iterator[tuple[nn.Parameter, ParameterParts]]:
    """Yield the parameters of the optimizer that belong to FSDP1, each with its parts.

    FSDP1 keeps a rank's parts in one flat parameter. With `use_orig_params` the optimizer has views into it;
    otherwise it has the flat parameter, whose parts are named as in its module.
    """
    for module in (module for module in model.modules() if isinstance(module, FullyShardedDataParallel)):
        handle = private.FLAT_HANDLE.of(module)
        if handle is None or (private.USE_ORIG_PARAMS.of(handle) and not handle.uses_sharded_strategy):
            continue
        flat: Any = handle.flat_param
        views = private.FLAT_PARAMETERS.of(flat) or [None] * private.FLAT_COUNT.of(flat)
        as_rows = zip(private.FLAT_CONTIGUITIES.of(flat), private.FLAT_STRIDES.of(flat), strict=True)
        orders = [() if is_row_major else _order(strides) for is_row_major, strides in as_rows]
        columns = (private.FLAT_NAMES, private.FLAT_SHAPES, private.FLAT_SHARDS, private.FLAT_EXTENSIONS)
        described = zip(*(column.of(flat) for column in columns), views, orders, strict=True)
        parts: ParameterParts = {}
        for name, shape, info, spec, view, order in described:
            box, offset, outer = tuple(shape), (0,) * len(shape), tuple(shape)
            if spec is not None:  # the DTensorSpec of a parameter that is also sharded by TP
                outer = tuple(spec.shape)
                box, offset = private.LOCAL_SHAPE_AND_OFFSET.value(outer, spec.mesh, spec.placements)
            numel = info.numel_in_shard or 0
            extent = Extent(outer, tuple(offset), tuple(box), info.intra_param_start_idx or 0, numel, order)
            if view is not None:
                yield view, {"": ParameterPart(view, extent)}
            else:
                begin = info.offset_in_shard or 0
                parts[name] = ParameterPart(flat, extent, slice(begin, begin + numel))
        for tied in private.FLAT_TIED.of(flat) if parts else ():
            first = f"{tied.prim_module_name}.{tied.prim_param_name}".lstrip(".")
            parts[f"{tied.module_name}.{tied.param_name}".lstrip(".")] = parts[first]
        if parts:
            yield flat, parts


def _order(strides: tuple[int, ...]) -> tuple[int, ...]:
    """Return the dimensions from the slowest in memory on."""
    return tuple(sorted(range(len(strides)), key=lambda dimension: -strides[dimension]))
