"""Snapshots: the live state of one rank, the ground truth of every comparison.

A snapshot does not use DCP's state-dict functions, because they are under test: a bug that they make on the
way in and undo on the way out would be invisible. It reads this rank's parameters, buffers and optimizer
entries as training uses them: a DTensor's local shard, FSDP1's view into its flat parameter, a replica. Its
tensors are those of the live state and change with it.

A `retained` snapshot does not change: small parts are copied, and of large parts only a digest of each block
is kept. The digests show roughly where a part differs; the checkpoint shows it exactly, if its content has
the same digests.

Nested containers are taken apart as DCP flattens them into the keys of a checkpoint: mappings, and lists with
a tensor or a mapping at any depth. Any other value has one key.
"""

import copy
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from dcpbench.core.rank_report import Skip
from dcpbench.core.state import Key, Name, StatePart, text_of
from dcpbench.formats.audit import Entry
from dcpbench.state.digest import Digest, add, digest, digests_as_integers
from dcpbench.state.layout import (
    Extent,
    ParameterPart,
    ParameterParts,
    called_modules,
    extent_of,
    parameter_parts,
    whole,
)
from dcpbench.torch_private import (
    BUFFERS,
    CHECKPOINT_WRAPPED,
    CHILDREN,
    FSDP_WRAPPED,
    IS_WRAPPER_SUBCLASS,
    LOCAL_TENSOR,
    NON_PERSISTENT,
    ORIGINAL_MODULE,
)

LARGE_BYTES = 4 * 2**20
"""Larger parts are not copied."""
BLOCK = 2**22
"""Number of elements of a part that one digest covers."""

_UNCHANGING = (int, float, str, type(None))
"""Types of values that are not copied, because they are immutable and numerous."""
SCALARS = frozenset({bool, *_UNCHANGING})
"""The same types without their subclasses. Most values have one of them, and `type(value) in SCALARS` takes a
tenth of the time of `isinstance`."""
_TEXTS = frozenset({str})
_UNDIVIDED = SCALARS | {tuple, torch.Tensor, nn.Parameter, DTensor}
"""Types of values that are never containers."""

_WRAPPERS = {ORIGINAL_MODULE.name, FSDP_WRAPPED.value, CHECKPOINT_WRAPPED.value}
"""Parts of a name that wrappers of a module add."""
_is_wrapper_subclass = IS_WRAPPER_SUBCLASS.value


@dataclass(frozen=True)
class TensorLeaf:
    """A tensor's part on this rank (`extent.numel` elements), its position in the full tensor, the placements
    of a DTensor, and the kind of state (param, buffer, exp_avg, …)."""

    local: torch.Tensor
    extent: Extent
    placements: str | None
    kind: str = "tensor"

    @property
    def dtype(self) -> torch.dtype:
        return self.local.dtype

    def __repr__(self) -> str:
        return f"a tensor of {self.dtype}"


@dataclass(frozen=True)
class DigestedLeaf:
    """A `TensorLeaf` without its elements: a digest for each `BLOCK` of them, in row-major order; of a full
    tensor whose content differs by rank also the digest on each rank."""

    dtype: torch.dtype
    extent: Extent
    placements: str | None
    kind: str
    blocks: tuple[Digest, ...]
    of_ranks: tuple[Digest, ...] = ()

    def __repr__(self) -> str:
        return f"a tensor of {self.dtype}"

    def block_ends(self, number: int) -> tuple[list[int], list[int]]:
        """Return the indices in the full tensor of a block's first and last element."""
        begin, end = number * BLOCK, min((number + 1) * BLOCK, self.extent.numel)
        return self.extent.global_index(begin), self.extent.global_index(end - 1)


@dataclass(frozen=True)
class EmptyShard:
    """An optimizer's entry for a parameter of which this rank has no element. It can be absent (FSDP1 keeps
    or drops such entries from call to call); if both sides have one, they must be equal."""

    leaf: Any


class Slot(NamedTuple):
    """A container of values in a live run.

    Args:
        prefix: of the names of its values in a snapshot; the name itself if it is a single value.
        read: returns the values, nested.
        put: puts other ones there.
        like: the parameter whose layout tensors have, if there is one.
    """

    prefix: "Name"
    read: Callable[[], Any]
    put: Callable[[Any], object]
    like: ParameterPart | None = None

    @classmethod
    def of(cls, stateful: Any, *prefix: str) -> "Slot":
        """Return that of an object with `state_dict` and `load_state_dict`."""
        return cls(prefix, stateful.state_dict, stateful.load_state_dict)

    def leaves(self, values: Any) -> "Leaves":
        """Return the snapshot of values in it."""
        *above, last = self.prefix
        return snapshot_nested({last: values}, tuple(above))


Leaf = Any
"""`TensorLeaf` or `DigestedLeaf` for a tensor, `EmptyShard`, or a copy of any other value."""
Leaves = dict[Name, Leaf]
"""Every piece of state by its name."""
State = dict[StatePart, Leaves]
"""The leaves of each part of the state of a run."""
PLAIN = (DigestedLeaf, Extent)
"""Classes that digested leaves consist of."""


def snapshot_model(model: nn.Module, parts: ParameterParts | None = None) -> Leaves:
    """Return parameters, persistent buffers and extra state by FQN; `parts` are the `named_parts`, if
    known."""
    parts = parts or named_parts(model)
    parameters: Leaves = {(name,): leaf for name, leaf in snapshot_parameters(parts).items()}
    buffers: Leaves = {(name,): _leaf(buffer, "buffer") for name, buffer in persistent_buffers(model).items()}
    extra = {place.prefix[-1]: place.read() for place in extra_states(model)}
    return {**parameters, **buffers, **(snapshot_nested(extra) if extra else {})}


def snapshot_parameters(parts: ParameterParts) -> dict[str, TensorLeaf]:
    """Return parameters by FQN."""
    return {name: _leaf(part.of(part.parameter), "param", part.extent) for name, part in parts.items()}


def extra_states(model: nn.Module, *prefix: str) -> Iterator[Slot]:
    """Yield the extra state of each module that has some."""
    for name, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            fqn = plain_fqn(model, f"{name}._extra_state".lstrip("."))
            yield Slot((*prefix, fqn), module.get_extra_state, module.set_extra_state)


def snapshot_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, parts: ParameterParts | None = None
) -> Leaves:
    """Return state entries as ("state", FQN, entry) and hyperparameters as ("param_groups", n, key). The
    entry of a flat parameter is split into those of its parameters. A parameter that the model does not have
    is called `group<n>.<number>`, and is part of the state."""
    parts_by_id = parts_of_each(parts or named_parts(model))
    leaves: Leaves = {}
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if id(parameter) not in parts_by_id:
                name = f"group{number}.{place}"
                parts_by_id[id(parameter)] = {name: ParameterPart(parameter, extent_of(parameter))}
                leaves["params", name] = _leaf(parameter, "param")
    for parameter, entries in optimizer.state.items():
        if entries is None:  # ZeRO's, of a parameter that another rank steps
            continue
        if not isinstance(parameter, torch.Tensor):  # state that belongs to no parameter
            leaves |= snapshot_nested({parameter: entries}, ("state",))
            continue
        local_shape, parts_of = local_part(parameter).shape, parts_by_id[id(parameter)]
        for holder, key, path in leaf_slots(entries):
            entry = holder[key]
            # A moment has the layout of its parameter; a step counter or a factored moment does not.
            is_tensor = isinstance(entry, torch.Tensor)
            like = is_tensor and getattr(entry, LOCAL_TENSOR.name, entry).shape == local_shape
            lies = like and bool(local_shape)
            for name, part in parts_of.items():
                idle = part.extent.numel == 0 and 0 not in part.extent.shape
                here = entry if part.place is None or not lies else part.of(entry)
                leaf = _leaf(here, str(key), part.extent if lies else None)
                leaves["state", name, *path] = EmptyShard(leaf) if idle else leaf
                if is_tensor and not like and len(parts_of) > 1:
                    entry = entry.clone()  # each parameter in a flat one has a separate counter
    for number, group in enumerate(optimizer.param_groups):
        names = [name for parameter in group["params"] for name in parts_by_id[id(parameter)]]
        leaves |= snapshot_nested({**group, "params": names}, ("param_groups", number))
    return leaves


def by_parameter(leaves: Leaves) -> Leaves:
    """Convert a snapshot of an optimizer to one with the hyperparameters of each group under the names of its
    parameters: ("param_groups", FQN, key)."""
    by_fqn: Leaves = {}
    for name, leaf in leaves.items():
        first, number, *rest = name
        if first != "param_groups":
            by_fqn[name] = leaf
        elif rest != ["params"]:
            by_fqn |= {(first, fqn, *rest): leaf for fqn in leaves[first, number, "params"]}
    return by_fqn


def names_parameters(name: Name, leaf: Leaf) -> bool:
    """Return whether a leaf is the list of the parameters in a group of an optimizer."""
    return isinstance(leaf, list) and name[0] == "param_groups" and name[2:] == ("params",)


def may_be_absent(name: Name, actual: Leaves) -> bool:
    """Return whether a name is an optimizer's entry for a parameter without an element on this rank."""
    parameter = actual.get(name[1:2]) if name[0] == "state" else None
    return isinstance(parameter, TensorLeaf) and not parameter.extent.numel


def snapshot_nested(nested: Mapping[Any, Any], prefix: Name = ()) -> Leaves:
    """Return the values in nested containers by name."""
    leaves: Leaves = {}
    for holder, key, name in leaf_slots(nested, prefix):
        value = holder[key]
        leaves[name] = value if type(value) in SCALARS else _leaf(value, str(key), name=name)
    return leaves


def of_kind(kind: str, leaves: Mapping[Key, Leaf]) -> dict[Key, Leaf]:
    """Return the tensors of a kind of state."""
    return {name: leaf for name, leaf in leaves.items() if getattr(leaf, "kind", None) == kind}


def without_prefix(leaves: Leaves, prefix: Name) -> Leaves:
    """Return the leaves whose names begin with a prefix, without the prefix."""
    length = len(prefix)
    return {name[length:]: leaf for name, leaf in leaves.items() if name[:length] == prefix}


def retained(leaves: Leaves) -> Leaves:
    """Return leaves that no longer change with the live state."""
    large = {
        name: leaf
        for name, leaf in leaves.items()
        if type(leaf) is TensorLeaf and leaf.local.nbytes > LARGE_BYTES
    }
    kept = {**leaves, **digested(large)} if large else leaves
    return {
        name: _copied(leaf) if type(leaf) is TensorLeaf or type(leaf) is EmptyShard else leaf
        for name, leaf in kept.items()
    }


def digested(leaves: Mapping[Key, Leaf]) -> dict[Key, Leaf]:
    """Return the same leaves, with digests instead of tensors."""
    parts: dict[Key, TensorLeaf] = {
        name: leaf for name, leaf in leaves.items() if isinstance(leaf, TensorLeaf)
    }
    without = {
        name: DigestedLeaf(leaf.dtype, leaf.extent, leaf.placements, leaf.kind, blocks)
        for (name, leaf), blocks in zip(parts.items(), block_digests([*parts.values()]), strict=True)
    }
    return {**leaves, **without}


def block_digests(parts: Sequence[TensorLeaf]) -> list[tuple[Digest, ...]]:
    """Return the digests of each part's blocks; synchronizes with the device once."""
    counted = [[digest(*block) for block in _blocks(part)] for part in parts]
    fetched = iter(digests_as_integers([block for blocks in counted for block in blocks]))
    return [tuple(next(fetched) for _ in blocks) for blocks in counted]


def content_digest(leaf: Leaf) -> Digest | None:
    """Return the digest of a part; None if the leaf is not a tensor."""
    if isinstance(leaf, DigestedLeaf):
        return add(*leaf.blocks)
    return add(*block_digests([leaf])[0]) if isinstance(leaf, TensorLeaf) else None


def has_content(leaf: Leaf, full: torch.Tensor) -> bool:
    """Return whether a full tensor has the dtype of a part's and, at its place, its content."""
    if not isinstance(leaf, TensorLeaf | DigestedLeaf):
        return False
    extent = leaf.extent
    is_like = (tuple(full.shape), full.dtype) == (extent.shape, leaf.dtype)
    return is_like and content_digest(TensorLeaf(extent.take(full), extent, None)) == content_digest(leaf)


def _blocks(part: TensorLeaf) -> Iterator[tuple[torch.Tensor, Extent]]:
    flat, extent = part.local.reshape(-1), part.extent
    for begin in range(0, extent.numel, BLOCK):
        block = flat[begin : begin + BLOCK]
        yield block, replace(extent, start=extent.start + begin, numel=block.numel())


def _copied(leaf: Leaf) -> Leaf:
    if type(leaf) is TensorLeaf:
        local = leaf.local.clone(memory_format=torch.contiguous_format)
        return TensorLeaf(local, leaf.extent, leaf.placements, leaf.kind)
    return EmptyShard(_copied(leaf.leaf)) if type(leaf) is EmptyShard else leaf


def named_parts(model: nn.Module) -> ParameterParts:
    """Return this rank's part of each parameter by FQN, tied parameters under each of their names."""
    return {plain_fqn(model, name): part for name, part in parameter_parts(model).items()}


def parts_of_each(parts: ParameterParts) -> dict[int, ParameterParts]:
    """Group parts by the `id` of their parameter, tied ones under the first of their names, as in
    `model.named_parameters()`. A flat parameter has several parts."""
    first = {part: name for name, part in reversed(parts.items())}
    by_id: dict[int, ParameterParts] = {}
    for name, part in parts.items():
        if first[part] == name:
            by_id.setdefault(id(part.parameter), {})[name] = part
    return by_id


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the live parameters of this rank by FQN, tied ones under each of their names, and a flat one
    under the names of its parameters."""
    return {name: part.parameter for name, part in named_parts(model).items()}


def persistent_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the live parameters and persistent buffers of a model by FQN."""
    return {**named_parameters(model), **persistent_buffers(model)}


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the persistent buffers of a model by FQN."""
    return {
        plain_fqn(model, f"{prefix}.{name}".lstrip(".")): buffer
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name, buffer in BUFFERS.of(module).items()
        if buffer is not None and name not in NON_PERSISTENT.of(module)
    }


def plain_fqn(model: nn.Module, name: str) -> str:
    """Return the name of a parameter in the unwrapped model."""
    if "mod" not in name:  # every wrapper's name has it
        return name
    module: Any = model
    parts = []
    for word in name.split("."):
        if word not in _WRAPPERS and not (word == "module" and isinstance(module, DistributedDataParallel)):
            parts.append(word)
        module = getattr(module, CHILDREN.name, {}).get(word)
    return ".".join(parts)


@contextmanager
def named_as_saved(model: nn.Module) -> Iterator[None]:
    """Context manager: `named_parameters()` of the modules that are called has the names of the unwrapped
    ones. So groups made by name, and the names that an optimizer keeps, do not depend on the layout."""
    named = {id(module): module for module in (model, *called_modules(model))}.values()
    # Not by `setattr`, which a compiled model passes on to the one that it wraps.
    for module in named:
        vars(module)["named_parameters"] = partial(_named_as_saved, module)  # a copy names its own parameters
    try:
        yield
    finally:
        for module in named:
            del vars(module)["named_parameters"]


def _named_as_saved(module: nn.Module, *args: Any, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
    for name, parameter in type(module).named_parameters(module, *args, **options):
        yield plain_fqn(module, name), parameter


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor, detached, not copied."""
    return (LOCAL_TENSOR.of(tensor) if isinstance(tensor, DTensor) else tensor).detach()


def is_composite(tensor: torch.Tensor) -> bool:
    """Return whether a tensor consists of others: a nested or sparse one, or one of a subclass."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return True
    return type(tensor) is not torch.Tensor and _is_wrapper_subclass(tensor)


def kind_of(name: Name, leaf: Leaf) -> str:
    """Return the kind of state of a leaf; for other values than tensors the key or the object's name."""
    if kind := getattr(leaf, "kind", None):
        return str(kind)
    if name[0] in ("param_groups", "state"):
        return str(name[-1])
    return str(name[0]).partition(".")[0]  # of the extra state of a module its first name


def _leaf(value: Any, kind: str, extent: Extent | None = None, name: Name = ()) -> Leaf:
    """Return the leaf of a value with this name; `extent` is that of a tensor that is part of another without
    being a DTensor. A cell with a tensor that cannot be compared is a skip."""
    if type(value) is torch.Tensor and not value.requires_grad:  # most; there is nothing to detach
        if value.layout is torch.strided and not value.is_nested:
            return TensorLeaf(value, extent or whole(value), None, kind)
    elif not isinstance(value, torch.Tensor):
        if isinstance(value, _UNCHANGING):
            return value
        if type(value) in (list, tuple) and SCALARS.issuperset(map(type, value)):
            return value[:]
        try:
            if callable(value):  # deepcopy accepts every function
                pickle.dumps(value)
            return copy.deepcopy(value)
        except Exception as error:
            instead = "keep a number, text, list or dictionary that it can be built from"
            raise TypeError(
                f"{text_of(name or kind)!r} in the state cannot be saved: {error}; {instead}"
            ) from error
    local = local_part(value)
    if is_composite(local):
        of = type(local).__name__ if local.layout is torch.strided else local.layout
        raise Skip(f"{text_of(name or kind)!r} in the state, of type {of}, cannot be compared")
    placements = str(value.placements) if isinstance(value, DTensor) else None
    return TensorLeaf(local, extent or extent_of(value), placements, kind)


def expected_entries(leaves: Mapping[Key, Leaf]) -> dict[str, Entry]:
    """Return the entries that a checkpoint of this snapshot should have, by flattened key. Where the snapshot
    has a number, the state dict can have a tensor without dimensions."""
    return {
        text_of(name): Entry(leaf.extent.shape, str(leaf.dtype))
        if isinstance(leaf, TensorLeaf | DigestedLeaf)
        else Entry()
        for name, leaf in leaves.items()
        if not isinstance(leaf, EmptyShard)
    }


def is_container(value: Any) -> bool:
    """Return whether DCP flattens a value; any other value is stored under one key."""
    if type(value) in _UNDIVIDED:
        return False
    if isinstance(value, list):
        plain = SCALARS.issuperset(map(type, value))
        return not plain and any(
            isinstance(element, torch.Tensor) or is_container(element) for element in value
        )
    return isinstance(value, Mapping)


def entries_of(nested: Any, prefix: Name = ()) -> list[tuple[Any, Any, Name]]:
    """Return the key or index, the value and the name of each item of a container. A text keeps its
    quotes if there is a number with the same digits: DCP gives both the same key."""
    if isinstance(nested, list):
        return [(number, element, (*prefix, number)) for number, element in enumerate(nested)]
    if _TEXTS.issuperset(map(type, nested)):
        return [(name, value, (*prefix, name)) for name, value in nested.items()]
    numbers = {str(name) for name in nested if not isinstance(name, str)}
    return [
        (name, entry, (*prefix, repr(name) if name in numbers else str(name)))
        for name, entry in nested.items()
    ]


def leaf_slots(nested: Any, prefix: Name = ()) -> list[tuple[Any, Any, Name]]:
    """Return the place of each value: its container, its key or index there, and its name."""
    entries = entries_of(nested, prefix)
    if _UNDIVIDED.issuperset(map(type, nested if isinstance(nested, list) else nested.values())):
        return [(nested, key, name) for key, _, name in entries]
    places: list[tuple[Any, Any, Name]] = []
    for key, entry, name in entries:
        if type(entry) not in _UNDIVIDED and is_container(entry):
            places += leaf_slots(entry, name)
        else:
            places.append((nested, key, name))
    return places


def flattened(nested: Any) -> dict[str, Any]:
    """Return the values in nested containers by their flattened keys."""
    return {text_of(name): container[key] for container, key, name in leaf_slots(nested)}


def map_leaves(nested: Any, change: Callable[[Any, Name], Any], prefix: Name = ()) -> Any:
    """Return a copy of a container, in which every value is `change(value, name)`."""
    copied = {
        key: map_leaves(entry, change, name) if is_container(entry) else change(entry, name)
        for key, entry, name in entries_of(nested, prefix)
    }
    return [*copied.values()] if isinstance(nested, list) else copied
