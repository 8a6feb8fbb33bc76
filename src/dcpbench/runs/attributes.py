"""The attributes of a user's trainer in addition to its model and its optimizer.

They are compared at the end of a resumed run, one level deep: numbers, texts, tensors, arrays, generators and
collections of these; plain attributes of objects of the user's classes and optimizers; what has a
`state_dict()`, which is called after a step only. Those of the trainer itself have to be restored by the load
too, as one that is lost can be overwritten later; or be held somewhere else, to be taken over when needed.
"""

import dataclasses
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer as Zero

from dcpbench.compare.leaves import same_leaves
from dcpbench.core.state import Name, text_of
from dcpbench.runs.unsaved_values import is_user_module
from dcpbench.state.snapshot import (
    LARGE_BYTES,
    Leaves,
    is_composite,
    persistent_tensors,
    snapshot_nested,
)
from dcpbench.torch_private import SCHEDULER_BOOKKEEPING
from dcpbench.workloads.generators import KINDS, state_of_generator
from dcpbench.workloads.optimizers import Optimizers

_SCALARS = (bool, int, float, complex, str, bytes, np.generic, type(None))
_COLLECTIONS = (list, tuple, set, frozenset, deque)
_DEEPEST = 50
"""How deep plain values are nested at most."""
_DEEPEST_HELD, _MOST_HELD = 4, 1_000
"""How deep a value is looked for that a load has put elsewhere, and in collections of how many parts."""
_BOOKKEEPING: Mapping[str, tuple[str, ...]] = {
    # It differs in a scheduler that is built at the step of a checkpoint.
    "torch.optim.lr_scheduler": tuple(key.name for key in SCHEDULER_BOOKKEEPING),
    # It counts one too many after a restore, as it looks ahead; its root has the place.
    "torchdata.nodes.loader": ("num_yielded",),
    # Drawn from a default generator for each epoch's workers. Losses show what these draw.
    "torchdata.stateful_dataloader.stateful_dataloader": ("_base_seed",),
}
"""Parts of the states of classes, by their modules, that no training depends on."""


def changed_by_training(first: Leaves, trained: Leaves) -> frozenset[Name]:
    """Return the attributes that training changes, given those of a new trainer with those of its objects
    after a step, and those after training."""
    return frozenset((trained.keys() | first.keys()) - same_leaves(first, trained))


class ZeroOptimizer(Optimizers):
    """ZeroRedundancyOptimizer: copies of its groups, which a step sets from those of the optimizer inside it,
    and the state of this one, which steps the parameters of this rank. Its own state is that of the last
    load."""

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state of the parameters that this rank steps."""
        (zero,) = self.optimizers
        return zero.optim.state  # type: ignore[attr-defined]

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Copies of its groups."""
        return [{**group} for group in super().param_groups]


def optimizers_of(trainer: Any) -> list[torch.optim.Optimizer]:
    """Return the optimizers of a trainer."""
    several = getattr(trainer, "optimizers", None)
    return list(several) if several else [trainer.optimizer]


def optimizer_of(trainer: Any) -> torch.optim.Optimizer:
    """Return the optimizer of a trainer whose state is compared, several or none as one: `not_saved` can name
    each by an attribute, or all."""
    several = [
        ZeroOptimizer([optimizer]) if isinstance(optimizer, Zero) else optimizer
        for optimizer in _compared(trainer)
    ]
    return several[0] if len(several) == 1 else Optimizers(several)


def _compared(trainer: Any) -> list[torch.optim.Optimizer]:
    left_out = set[int]()
    for name in {*getattr(trainer, "not_saved", ())}:
        default = optimizers_of(trainer) if name in ("optimizer", "optimizers") else None
        named = getattr(trainer, name, default)
        left_out |= {*map(id, named)} if isinstance(named, list | tuple) else {id(named)}
    return [optimizer for optimizer in optimizers_of(trainer) if id(optimizer) not in left_out]


def own_attributes(trainer: Any) -> Leaves:
    """Return the plain attributes of a trainer. No method of it, or of what it holds, is called."""
    leaves: Leaves = {}
    for name, attribute in _named(trainer):
        if is_plain(attribute) and not _is_of_model(attribute, trainer):
            leaves |= snapshot_nested({name: _as_leaves(attribute)})
    return leaves


def inner_attributes(trainer: Any) -> tuple[Leaves, dict[str, str]]:
    """Return, of the objects that a trainer's attributes hold, the states of those with a `state_dict()` and
    the plain attributes of those of the user's classes; those of the user's optimizers; and, by name, the
    types of objects that cannot be read."""
    leaves: Leaves = {}
    unread: dict[str, str] = {}
    compared = {id(holder) for holder in (trainer, *trainer.model.modules(), *optimizers_of(trainer))}
    for attribute, attribute_value in _named(trainer):
        for name, holder in () if is_plain(attribute_value) else _held(attribute, attribute_value):
            if id(holder) in compared or is_plain(holder):
                continue
            try:
                state = _state_of(holder)
            except Exception as error:  # noqa: BLE001 - any exception of the user's code
                raised = f"state_dict() raised {type(error).__name__}: {error}"
                unread[text_of(name)] = f"{type(holder).__name__} ({raised})"
                continue
            if isinstance(state, Mapping):
                leaves |= _plain_parts(state, name)
            elif isinstance(holder, Iterable):
                unread[text_of(name)] = type(holder).__name__
    for name, optimizer in _held("optimizer", _compared(trainer)):
        if is_user_module(type(optimizer).__module__):
            leaves |= _plain_parts(vars(optimizer), name)
    return leaves, unread


def _plain_parts(state: Mapping[Any, Any], name: Name) -> Leaves:
    return snapshot_nested({key: _as_leaves(inner) for key, inner in state.items() if is_plain(inner)}, name)


def values_within(trainer: Any) -> Leaves:
    """Return the plain values in a trainer, some levels deep in collections and in objects of the user's
    classes, without large tensors. No method is called."""
    leaves: Leaves = {}
    seen = set[int]()
    due: list[tuple[Name, Any]] = [((name,), attribute) for name, attribute in _named(trainer)]
    due.append((("optimizer",), _compared(trainer)))
    for name, value in due:  # it grows
        parts = dict(enumerate(value)) if isinstance(value, list | tuple | deque) else value
        if is_user_module(type(value).__module__) and hasattr(value, "__dict__"):
            parts = vars(value)
        if isinstance(parts, Mapping) and len(name) <= _DEEPEST_HELD and id(value) not in seen:
            seen.add(id(value))
            few = [(key, inner) for key, inner in parts.items() if isinstance(key, str | int)][:_MOST_HELD]
            due += [((*name, key), inner) for key, inner in few]
        is_large = isinstance(value, torch.Tensor) and (is_composite(value) or value.nbytes > LARGE_BYTES)
        if is_plain(value) and not isinstance(value, Mapping) and not is_large:
            leaves |= snapshot_nested({name[-1]: _as_leaves(value)}, name[:-1])
    return leaves


def is_plain(value: Any, depth: int = 0) -> bool:
    """Return whether a value is a number, a text, a tensor, an array, a generator, None or a collection of
    these."""
    if isinstance(value, _SCALARS + KINDS + (np.ndarray,)):
        return True
    if isinstance(value, torch.Tensor):
        return not isinstance(value, nn.Parameter)
    if depth >= _DEEPEST:
        return False
    if isinstance(value, Mapping):
        keys = all(isinstance(key, _SCALARS) for key in value)
        return keys and all(is_plain(inner, depth + 1) for inner in value.values())
    return isinstance(value, _COLLECTIONS) and all(is_plain(inner, depth + 1) for inner in value)


def _named(trainer: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a trainer that can be compared, by name."""
    left_out = {"model", "optimizer", "optimizers", *getattr(trainer, "not_saved", ())}
    attributes = getattr(trainer, "__dict__", {})
    yield from ((name, attribute) for name, attribute in attributes.items() if name not in left_out)


def _is_of_model(value: Any, trainer: Any) -> bool:
    return isinstance(value, torch.Tensor) and any(
        value is tensor for tensor in persistent_tensors(trainer.model).values()
    )


def _held(attribute: str, value: Any) -> Iterator[tuple[Name, Any]]:
    """Yield an object, or the objects in a collection, by name."""
    if isinstance(value, Mapping):
        yield from (((attribute, key), holder) for key, holder in value.items())
    elif isinstance(value, list | tuple | deque):
        yield from (((attribute, number), holder) for number, holder in enumerate(value))
    else:
        yield (attribute,), value


def _state_of(holder: Any) -> Any:
    """Return the state of an object, a mapping; None if it has none that can be read."""
    if isinstance(holder, type):
        return None
    if isinstance(holder, nn.Module):
        return {key: tensor.detach() for key, tensor in persistent_tensors(holder).items()}
    if callable(getattr(holder, "state_dict", None)):
        modules = {kind.__module__ for kind in type(holder).__mro__}
        return _without(
            holder.state_dict(), {name for module in modules for name in _BOOKKEEPING.get(module, ())}
        )
    if dataclasses.is_dataclass(holder) or is_user_module(type(holder).__module__):
        return vars(holder) if hasattr(holder, "__dict__") else None
    return None


def _without(state: Any, bookkeeping: Collection[str]) -> Any:
    """Return the state of an object, and of those inside it, without its bookkeeping."""
    if not bookkeeping:
        return state
    if isinstance(state, Mapping):
        kept = {key: inner for key, inner in state.items() if key not in bookkeeping}
        return {key: _without(inner, bookkeeping) for key, inner in kept.items()}
    return [_without(inner, bookkeeping) for inner in state] if isinstance(state, list) else state


def _as_leaves(value: Any) -> Any:
    """Return a plain value as `snapshot_nested` takes it. A collection of numbers and texts is one leaf."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return _as_tensor(value)
    if isinstance(value, KINDS):
        return {"state": _as_leaves(*state_of_generator(value))}
    if isinstance(value, set | frozenset):
        # The order in a set depends on how it grew, and on the hash seed of the process.
        return "a set: " + ", ".join(sorted(repr(_as_leaves(element)) for element in value))
    if isinstance(value, Mapping):
        return {key: _as_leaves(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | deque):
        parts = [_as_leaves(element) for element in value]
        return repr(parts) if all(isinstance(leaf, _SCALARS) for leaf in parts) else dict(enumerate(parts))
    return value if isinstance(value, bool | int | float | str | torch.Tensor | None) else repr(value)


def _as_tensor(array: Any) -> Any:
    """Return an array as a tensor, or as a text if torch has no dtype for it."""
    try:
        return torch.from_numpy(array.copy())
    except (TypeError, ValueError):
        return f"{array.dtype}: {array.tolist()}"
