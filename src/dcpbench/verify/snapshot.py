"""The live state of one rank, where it lies: the ground truth of every comparison.

A snapshot does not go through DCP's state-dict functions, which are part of what is under test: a fault that
they make on the way in and undo on the way out would be invisible. It reads this rank's parameters, buffers
and optimizer entries as training uses them: a DTensor's local shard, FSDP1's view into its flat parameter, a
replica. Its tensors are those of the live state and change with it.

What is `retained` outlives its moment: small parts are copied, of large ones only digests are kept, one for
each block. They tell roughly where a part differs; what it was exactly the checkpoint can tell, if what it
holds has the retained digests.
"""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from dcpbench.verify.audit import Entry
from dcpbench.verify.digest import Digest, add, digest, fetch
from dcpbench.verify.layout import Extent, ParameterParts, extent_of, parameter_parts

LARGE_BYTES = 4 * 2**20
"""Parts of more bytes are not copied."""
BLOCK = 2**22
"""Elements of a part that one digest is made of."""

_UNCHANGING = (int, float, str, type(None))
"""Types of values that need not be copied, which takes time: there are many."""

_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


@dataclass(frozen=True)
class TensorLeaf:
    """A tensor's part on this rank (`extent.numel` elements), where it lies in the whole, how a DTensor says
    it is placed, and what kind of state it is (param, buffer, exp_avg, …)."""

    local: torch.Tensor
    extent: Extent
    placements: str | None
    kind: str = "tensor"

    @property
    def dtype(self) -> torch.dtype:
        return self.local.dtype


@dataclass(frozen=True)
class DigestedLeaf:
    """A `TensorLeaf` without its elements: a digest for each `BLOCK` of them, in row-major order."""

    dtype: torch.dtype
    extent: Extent
    placements: str | None
    kind: str
    blocks: tuple[Digest, ...]

    def block_ends(self, number: int) -> tuple[list[int], list[int]]:
        """The indices in the whole tensor of a block's first and last element."""
        begin, end = number * BLOCK, min((number + 1) * BLOCK, self.extent.numel)
        return self.extent.global_index(begin), self.extent.global_index(end - 1)


@dataclass(frozen=True)
class Idle:
    """An optimizer's entry for a parameter of which this rank holds no element. It may be absent (FSDP1 keeps
    such entries or not from one call to the next); where both sides have one, they must be equal."""

    leaf: Any


Leaf = Any
"""A tensor as `TensorLeaf` or `DigestedLeaf`, such an entry as `Idle`; all else as a copy of the value."""
Leaves = dict[str, Leaf]
"""Every piece of state by its name."""
PLAIN = (DigestedLeaf, Extent)
"""The classes of what is left of leaves when tensors are digested."""


def snapshot_model(model: nn.Module, parts: ParameterParts | None = None) -> Leaves:
    """Parameters and persistent buffers by FQN, and what modules hand out as extra state; `parts` are the
    `named_parts`, if they are known."""
    parts = parts or named_parts(model)
    parameters = {name: _leaf(part.of(part.parameter), "param", part.extent) for name, part in parts.items()}
    buffers = {name: _leaf(value, "buffer") for name, value in persistent_buffers(model).items()}
    extra = {
        plain_fqn(model, f"{prefix}._extra_state".lstrip(".")): module.get_extra_state()
        for prefix, module in model.named_modules()
        if has_extra_state(module)
    }
    return {**parameters, **buffers, **snapshot_nested(extra)}


def has_extra_state(module: nn.Module) -> bool:
    """Whether a module has state that is neither parameter nor buffer."""
    return type(module).get_extra_state is not nn.Module.get_extra_state


def snapshot_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, parts: ParameterParts | None = None
) -> Leaves:
    """State entries as `state.<FQN>.<entry>`, hyperparameters as `param_groups.<n>.<key>`. What the optimizer
    has for a flat parameter is under the name of each parameter in it."""
    parts_by_id = parts_of_each(parts or named_parts(model))
    leaves: Leaves = {}
    for parameter, entries in optimizer.state.items():
        if not isinstance(parameter, torch.Tensor):  # of no parameter
            leaves |= snapshot_nested({parameter: entries}, "state.")
            continue
        local_shape = _local_shape(parameter)
        for path, entry, value in _flattened(entries):
            # A moment lies as its parameter does; a step counter or a factored moment does not.
            like = isinstance(value, torch.Tensor) and _local_shape(value) == local_shape
            lies = bool(like and local_shape)
            for name, part in parts_by_id[id(parameter)].items():
                idle = part.extent.numel == 0 and math.prod(part.extent.shape) > 0
                leaf = _leaf(part.of(value), entry, part.extent) if lies else _leaf(value, entry)
                leaves[f"state.{name}.{path}"] = Idle(leaf) if idle else leaf
                if isinstance(value, torch.Tensor) and not like:
                    value = value.clone()  # for the next parameter in a flat one: each has its own counter
    for number, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key == "params":
                value = [name for parameter in value for name in parts_by_id[id(parameter)]]
            leaves[f"param_groups.{number}.{key}"] = _leaf(value, key)
    return leaves


def by_parameter(leaves: Leaves) -> Leaves:
    """What `snapshot_optimizer` sees, with the hyperparameters of each group under the name of each of its
    parameters (`param_groups.<FQN>.<key>`)."""
    found: Leaves = {}
    for name, leaf in leaves.items():
        first, *rest = name.split(".", 2)
        if first != "param_groups":
            found[name] = leaf
        elif rest[1] != "params":
            names = leaves[f"param_groups.{rest[0]}.params"]
            found |= {f"param_groups.{fqn}.{rest[1]}": leaf for fqn in names}
    return found


def snapshot_nested(nested: Mapping[Any, Any], prefix: str = "") -> Leaves:
    """What nested dictionaries hold, by the path to it with dots between its keys. A list is one value, but
    for one that `has_parts`, which is gone into, as DCP does when it flattens a state dict.
    A text as key that stands beside a number of the same digits keeps its quotes."""
    return {path: _leaf(value, key) for path, key, value in _flattened(nested, prefix)}


def has_parts(value: Any) -> bool:
    """Whether a value is a list that holds tensors or dictionaries."""
    return isinstance(value, list) and any(isinstance(item, torch.Tensor | dict) for item in value)


def _flattened(nested: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, str, Any]]:
    """The path to each value in nested dictionaries, its own key and itself."""
    numbers = {str(key) for key in nested if not isinstance(key, str)}
    for key, value in nested.items():
        path = f"{prefix}{key!r}" if key in numbers else f"{prefix}{key}"
        if has_parts(value):
            value = {str(number): item for number, item in enumerate(value)}
        if isinstance(value, dict):
            yield from _flattened(value, f"{path}.")
        else:
            yield path, str(key), value


def of_kind(kind: str, leaves: Leaves) -> Leaves:
    """The tensors of a kind of state."""
    return {name: leaf for name, leaf in leaves.items() if getattr(leaf, "kind", None) == kind}


def below(leaves: Leaves, prefix: str) -> Leaves:
    """The leaves whose names begin with a prefix, without it."""
    return {name.removeprefix(prefix): leaf for name, leaf in leaves.items() if name.startswith(prefix)}


def retained(leaves: Leaves) -> Leaves:
    """The same leaves with nothing of the live state in them; values are copies already."""
    large = {
        name: leaf
        for name, leaf in leaves.items()
        if isinstance(leaf, TensorLeaf) and leaf.local.nbytes > LARGE_BYTES
    }
    return {name: _copied(leaf) for name, leaf in {**leaves, **digested(large)}.items()}


def digested(leaves: Leaves) -> Leaves:
    """The same leaves, with digests instead of tensors."""
    parts = {name: leaf for name, leaf in leaves.items() if isinstance(leaf, TensorLeaf)}
    without = {
        name: DigestedLeaf(leaf.dtype, leaf.extent, leaf.placements, leaf.kind, blocks)
        for (name, leaf), blocks in zip(parts.items(), block_digests([*parts.values()]), strict=True)
    }
    return {**leaves, **without}


def block_digests(parts: Sequence[TensorLeaf]) -> list[tuple[Digest, ...]]:
    """The digests of each part's blocks; waits for the device once."""
    counted = [[digest(*block) for block in _blocks(part)] for part in parts]
    found = iter(fetch([one for blocks in counted for one in blocks]))
    return [tuple(next(found) for _ in blocks) for blocks in counted]


def digest_of(leaf: Leaf) -> Digest | None:
    """Return the digest of a part; None of what is not a tensor."""
    if isinstance(leaf, DigestedLeaf):
        return add(*leaf.blocks)
    return add(*block_digests([leaf])[0]) if isinstance(leaf, TensorLeaf) else None


def _blocks(part: TensorLeaf) -> Iterator[tuple[torch.Tensor, Extent]]:
    flat, extent = part.local.reshape(-1), part.extent
    for begin in range(0, extent.numel, BLOCK):
        block = flat[begin : begin + BLOCK]
        yield block, replace(extent, start=extent.start + begin, numel=block.numel())


def _copied(leaf: Leaf) -> Leaf:
    if isinstance(leaf, Idle):
        return Idle(_copied(leaf.leaf))
    if isinstance(leaf, TensorLeaf):
        return replace(leaf, local=leaf.local.clone(memory_format=torch.contiguous_format))
    return leaf


def named_parts(model: nn.Module) -> ParameterParts:
    """This rank's part of each parameter by FQN, tied ones under each of their names."""
    return {plain_fqn(model, name): part for name, part in parameter_parts(model).items()}


def parts_of_each(parts: ParameterParts) -> dict[int, ParameterParts]:
    """The same parts by the `id` of their parameters, tied ones under the first of their names, as in
    `model.named_parameters()`. A flat parameter has several."""
    first = {part: name for name, part in reversed(parts.items())}
    found: dict[int, ParameterParts] = {}
    for name, part in parts.items():
        if first[part] == name:
            found.setdefault(id(part.parameter), {})[name] = part
    return found


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The live parameters of this rank by FQN, tied ones under each of their names; a flat one under the name
    of each parameter in it."""
    return {name: part.parameter for name, part in named_parts(model).items()}


def persistent_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """What a model's state dict holds, live: parameters and persistent buffers by FQN."""
    return {**named_parameters(model), **persistent_buffers(model)}


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """The persistent buffers of a model by FQN."""
    return {
        plain_fqn(model, f"{prefix}.{name}".lstrip(".")): value
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name, value in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    }


def plain_fqn(model: nn.Module, name: str) -> str:
    """The name that a parameter has in the unwrapped model."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    inner = getattr(model, "_orig_mod", model)
    return name.removeprefix("module.") if isinstance(inner, DistributedDataParallel) else name


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor, detached; not a copy."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    with torch.no_grad():
        return tensor.to_local().detach()


def _local_shape(tensor: torch.Tensor) -> torch.Size:
    return local_part(tensor).shape if isinstance(tensor, DTensor) else tensor.shape


def kind_of(name: str, leaf: Leaf) -> str:
    """What kind of state a leaf is: of what is no tensor a hyperparameter's key, or the object it is of."""
    if kind := getattr(leaf, "kind", None):
        return str(kind)
    first, *rest = name.split(".")
    return rest[-1] if rest and first in ("param_groups", "state") else first


def _leaf(value: Any, kind: str, extent: Extent | None = None) -> Leaf:
    """A tensor is all there or a DTensor unless its extent says otherwise."""
    if not isinstance(value, torch.Tensor):
        return value if isinstance(value, _UNCHANGING) else copy.deepcopy(value)
    return TensorLeaf(
        local=local_part(value),
        extent=extent or extent_of(value),
        placements=str(value.placements) if isinstance(value, DTensor) else None,
        kind=kind,
    )


def expected_of(leaves: Leaves) -> dict[str, Entry]:
    """What a rank's snapshot promises of a checkpoint's keys. What it looks at as a number the state dict may
    still hold as a tensor without dimensions."""
    return {
        name: Entry(leaf.extent.shape, str(leaf.dtype))
        if isinstance(leaf, TensorLeaf | DigestedLeaf)
        else Entry()
        for name, leaf in leaves.items()
        if not isinstance(leaf, Idle)
    }
