"""The attributes of a user's trainer in addition to its model and its optimizer, and when each is compared.

Losses and state after a restart judge a trainer. What it has is read only as far as it is plain, so that no
object of the user's is called or searched: numbers, texts, tensors, arrays, generators, and collections of
these. One level more is read after a step: plain attributes of objects of the user's classes, and what has a
`state_dict()`.
"""

import dataclasses
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from dcpbench.config.text import listed
from dcpbench.core.mismatch import Mismatch, Problem, Sides
from dcpbench.core.state import Name, text_of
from dcpbench.verify.compare import same_leaves
from dcpbench.verify.snapshot import Leaves, below, persistent_tensors, snapshot_nested
from dcpbench.workloads.generators import KINDS, state_of_generator
from dcpbench.workloads.optimizers import Optimizers
from dcpbench.workloads.unsaved_values import is_users

_SCALARS = (bool, int, float, complex, str, bytes, np.generic, type(None))
_COLLECTIONS = (list, tuple, set, frozenset, deque)
_DEEPEST = 50
"""How deep plain values are nested at most."""
_OF_SCHEDULERS = ("_step_count", "_get_lr_called_within_step", "_is_initial", "_initial_step")
"""Bookkeeping of torch's schedulers, which differs in one that is built at the step of a checkpoint."""
_NOTHING = {"None", "absent"}
_OF_ATTRIBUTES: Sides = (
    "{} when saved",
    "{} after the load; if no checkpoint has to restore it, list it in not_saved",
)


def judged_of(built: Leaves, stepped: Leaves, trained: Leaves) -> dict[Name, bool]:
    """Return the attributes that are compared, given those of a new trainer, after its first step and after
    training: those that training changes. A step can make one that a new trainer lacks, or that is None
    there; then it is compared after a step, and not from the load on."""
    before = stepped | built
    unchanged = same_leaves(before, trained)
    changed = (trained.keys() | before.keys()) - unchanged
    return {name: built.get(name) is not None for name in changed}


def judged_attributes(attributes: Leaves, judged: Mapping[Name, bool], loaded: bool | None = None) -> Leaves:
    """Return the attributes that are compared: those from the load on first, or those alone, or those from
    the first step after it on."""
    return {
        name: leaf
        for moment in ((True, False) if loaded is None else (loaded,))
        for name, leaf in attributes.items()
        if judged.get(name) is moment
    }


class ZeroOptimizer(Optimizers):
    """ZeroRedundancyOptimizer: its groups, and the state of the optimizer inside it, which steps the
    parameters of this rank. Its own state is that of the last load."""

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state of the parameters that this rank steps."""
        (zero,) = self.optimizers
        return zero.optim.state  # type: ignore[attr-defined]


def optimizers_of(trainer: Any) -> list[torch.optim.Optimizer]:
    """Return the optimizers of a trainer."""
    several = getattr(trainer, "optimizers", None)
    return list(several) if several else [trainer.optimizer]


def optimizer_of(trainer: Any) -> torch.optim.Optimizer:
    """Return the optimizer of a trainer whose state is compared, several or none as one: `not_saved` can name
    each by an attribute, or all."""
    left_out = set[int]()
    for name in {*getattr(trainer, "not_saved", ())}:
        default = optimizers_of(trainer) if name in ("optimizer", "optimizers") else None
        value = getattr(trainer, name, default)
        left_out |= {*map(id, value)} if isinstance(value, list | tuple) else {id(value)}
    several = [
        ZeroOptimizer([optimizer]) if hasattr(optimizer, "optim") else optimizer
        for optimizer in optimizers_of(trainer)
        if id(optimizer) not in left_out
    ]
    return several[0] if len(several) == 1 else Optimizers(several)


def own_attributes(trainer: Any) -> Leaves:
    """Return the plain attributes of a trainer. No method of it, or of what it holds, is called."""
    leaves: Leaves = {}
    for name, value in _named(trainer):
        if is_plain(value) and not _is_of_model(value, trainer):
            leaves |= snapshot_nested({name: _as_leaves(value)})
    return leaves


def inner_attributes(trainer: Any) -> tuple[Leaves, dict[str, str]]:
    """Return, of the objects that a trainer's attributes hold, the states of those with a `state_dict()` and
    the plain attributes of those of the user's classes; and, by name, the types of those that cannot be
    read."""
    leaves: Leaves = {}
    unread: dict[str, str] = {}
    compared = {id(holder) for holder in (trainer, *trainer.model.modules(), *optimizers_of(trainer))}
    for attribute, value in _named(trainer):
        for name, holder in () if is_plain(value) else _held(attribute, value):
            if id(holder) in compared or is_plain(holder):
                continue
            try:
                state = _state_of(holder)
            except Exception as error:  # noqa: BLE001 - any exception of the user's code
                raised = f"state_dict() raised {type(error).__name__}: {error}"
                unread[text_of(name)] = f"{type(holder).__name__} ({raised})"
                continue
            if isinstance(state, Mapping):
                plain = {key: _as_leaves(part) for key, part in state.items() if is_plain(part)}
                leaves |= snapshot_nested(plain, name)
            elif isinstance(holder, Iterable):
                unread[text_of(name)] = type(holder).__name__
    return leaves, unread


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
        return keys and all(is_plain(part, depth + 1) for part in value.values())
    return isinstance(value, _COLLECTIONS) and all(is_plain(part, depth + 1) for part in value)


def _named(trainer: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a trainer that can be compared, by name."""
    left_out = {"model", "optimizer", "optimizers", *getattr(trainer, "not_saved", ())}
    attributes = getattr(trainer, "__dict__", {})
    yield from ((name, value) for name, value in attributes.items() if name not in left_out)


def _is_of_model(value: Any, trainer: Any) -> bool:
    return isinstance(value, torch.Tensor) and any(
        value is tensor for tensor in persistent_tensors(trainer.model).values()
    )


def _held(attribute: str, value: Any) -> Iterator[tuple[Name, Any]]:
    """Yield an object, or the objects in a collection, by name."""
    if isinstance(value, Mapping):
        yield from (((attribute, key), part) for key, part in value.items())
    elif isinstance(value, list | tuple | deque):
        yield from (((attribute, number), part) for number, part in enumerate(value))
    else:
        yield (attribute,), value


def _state_of(holder: Any) -> Any:
    """Return the state of an object, a mapping; None if it has none that can be read."""
    if isinstance(holder, type):
        return None
    if isinstance(holder, nn.Module):
        return {key: tensor.detach() for key, tensor in persistent_tensors(holder).items()}
    if callable(getattr(holder, "state_dict", None)):
        state = holder.state_dict()
        return _without_bookkeeping(state) if isinstance(holder, LRScheduler) else state
    if dataclasses.is_dataclass(holder) or is_users(type(holder).__module__):
        return vars(holder) if hasattr(holder, "__dict__") else None
    return None


def _without_bookkeeping(state: Any) -> Any:
    """Return the state of a scheduler, and of those inside it, without what torch counts for its warnings."""
    if isinstance(state, Mapping):
        kept = {key: value for key, value in state.items() if key not in _OF_SCHEDULERS}
        return {key: _without_bookkeeping(value) for key, value in kept.items()}
    return [_without_bookkeeping(part) for part in state] if isinstance(state, list) else state


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
        return "a set: " + ", ".join(sorted(repr(_as_leaves(part)) for part in value))
    if isinstance(value, Mapping):
        return {key: _as_leaves(part) for key, part in value.items()}
    if isinstance(value, list | tuple | deque):
        parts = [_as_leaves(part) for part in value]
        return repr(parts) if all(isinstance(part, _SCALARS) for part in parts) else dict(enumerate(parts))
    return value if isinstance(value, bool | int | float | str | torch.Tensor | None) else repr(value)


def _as_tensor(array: Any) -> Any:
    """Return an array as a tensor, or as a text if torch has no dtype for it."""
    try:
        return torch.from_numpy(array.copy())
    except (TypeError, ValueError):
        return f"{array.dtype}: {array.tolist()}"


def of_attributes(found: Iterable[Mismatch], saved: Leaves, restored: Leaves) -> list[Mismatch]:
    """Merge mismatches into one for each attribute that is None, or absent, either when saved or after the
    load."""
    merged: dict[str, Mismatch] = {}
    attribute_of = {text_of(name): str(name[0]) for name in saved | restored}
    for mismatch in found:
        name = attribute_of.get(mismatch.name, "")  # that of another rank alone has none
        expected, actual = (_described(name, leaves) for leaves in (saved, restored))
        if not name or _NOTHING.isdisjoint((expected, actual)):
            merged[mismatch.name] = mismatch
        else:
            facts = {"expected": expected, "actual": actual}
            merged[name] = Mismatch(name, Problem.value, "attribute", facts=facts, sides=_OF_ATTRIBUTES)
    return [*merged.values()]


def _described(attribute: str, leaves: Leaves) -> str:
    if (attribute,) in leaves:
        return repr(leaves[attribute,])
    names = [text_of(name) for name in below(leaves, (attribute,))]
    return f"with {listed(names)}" if names else "absent"
