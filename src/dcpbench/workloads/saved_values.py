"""Put saved values into a run: tensors, hyperparameters, entries of optimizers, and states of objects."""

import copy
from collections.abc import Callable, Collection, Iterator, Set
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from dcpbench.core.state import Name, StatePart, named, text_of
from dcpbench.verify.compare import Recall, same_leaves
from dcpbench.verify.layout import ParameterPart
from dcpbench.verify.perturb import made_different
from dcpbench.verify.snapshot import (
    DigestedLeaf,
    Idle,
    Leaf,
    Leaves,
    TensorLeaf,
    has_extra_state,
    is_gone_into,
    items,
    local_part,
    named_parts,
    parts_of_each,
    plain_fqn,
)
from dcpbench.workloads.optimizers import each_of
from dcpbench.workloads.own_run import OwnRun
from dcpbench.workloads.run import Run, Unchanged
from dcpbench.workloads.run_state import State, live_state, saved_part

Put = Callable[[Any], object]
"""Puts changed values back to where they came from."""


def set_saved(target: Run, part: StatePart, names: Collection[Name], saved: Leaves, recall: Recall) -> None:
    """Set some names of a part to their saved values in a run, as far as these are known. A name that was
    not saved is removed.

    Args:
        saved: all leaves of the part, as they were saved.
        recall: reads a full tensor from the checkpoint, if only a digest of it was kept.
    """
    leaves = {name: _of(leaf) for name, leaf in saved.items()}
    _SavedValues(target, part, names, leaves, recall).set()


def change_again(
    target: Run, saved: State, unchanged: Unchanged, missed: Set[tuple[StatePart, str]]
) -> Unchanged:
    """Change what the first change of a load target has made equal to the saved state. Return what is
    unchanged, with what a user's object keeps.

    Args:
        missed: the parts and the texts of the names that a control has missed.
    """
    kept = dict(unchanged)
    for part in {part for part, _ in missed}:
        live, texts = live_state(target)[part], {name for of, name in missed if of is part}
        leaves = {name: saved[part][name] for name in named(saved[part], texts)}
        equal = same_leaves(leaves, live).difference(kept.get(part, ()))
        changed = {name: made_different(live[name], text_of(name), slice(None)) for name in equal}
        with suppress(Exception):  # a user's object may refuse them in any way
            set_saved(target, part, changed, changed, lambda name: None)
        same = same_leaves(leaves, live_state(target)[part])
        kept[part] = {*kept.get(part, ())}.difference(leaves) | same  # what differs needs no changed copy
    return kept


def _of(leaf: Leaf) -> Leaf:
    return leaf.leaf if isinstance(leaf, Idle) else leaf


@dataclass(frozen=True)
class _SavedValues:
    """The saved values of some names of a part, and the run that gets them."""

    target: Run
    part: StatePart
    names: Collection[Name]
    saved: Leaves
    recall: Recall

    def set(self) -> None:
        """Copy tensors in place; replace other values, and what is missing, in their containers."""
        for name, leaf in live_state(self.target).get(self.part, {}).items():
            if name in self.names and isinstance(part := _of(leaf), TensorLeaf):
                value = saved_part(self.saved, name, part.extent, self.recall)
                if value is not None and value.dtype == part.dtype:
                    part.local.copy_(value.reshape(part.local.shape))
        for prefix, values, put, of in self._containers():
            names = {name for name in self.names if name[: len(prefix)] == prefix}
            if prefix in names & self.saved.keys():  # the extra state of a module
                put(self._as_saved(prefix, values, of))
            elif names:
                values = values if is_gone_into(values) else {}
                mended, present = (
                    self._mended(values, prefix, of),
                    {name for *_, name in items(values, prefix)},
                )
                for name in (name for name in self.saved if name in names - present and name[:-1] == prefix):
                    mended[name[-1]] = self._as_saved(name, None, of)
                put(mended)

    def _containers(self) -> Iterator[tuple[Name, Any, Put, ParameterPart | None]]:
        """Yield the prefix of names, nested values, a function that puts them back, and the parameter that
        tensors are made like, if there is one."""
        model, optimizer = self.target.model, self.target.optimizer
        if self.part is StatePart.optimizer:
            parts = parts_of_each(named_parts(model))
            for one in each_of(optimizer):
                for parameter in (value for group in one.param_groups for value in group["params"]):
                    for fqn, part in parts.get(id(parameter), {}).items():
                        put = partial(one.state.__setitem__, parameter)
                        yield ("state", fqn), one.state.get(parameter, {}), put, part
            for number, group in enumerate(optimizer.param_groups):
                values = {key: value for key, value in group.items() if key != "params"}
                yield ("param_groups", number), values, group.update, None
        for name, state, load in self._objects():
            yield (name,), state, load, None

    def _objects(self) -> Iterator[tuple[str, Any, Put]]:
        """Yield the objects of the part: name, state, and a function that loads another state."""
        target = self.target
        if self.part is StatePart.model:
            for prefix, module in target.model.named_modules():
                if has_extra_state(module):
                    name = plain_fqn(target.model, f"{prefix}._extra_state".lstrip("."))
                    yield name, module.get_extra_state(), module.set_extra_state
        elif self.part is StatePart.random:
            yield "random", target.random.state_dict(), target.random.load_state_dict
        elif self.part is StatePart.scheduler and isinstance(target, OwnRun):
            yield "scheduler", target.scheduler.state_dict(), target.scheduler.load_state_dict
        elif self.part is StatePart.extra and isinstance(target, OwnRun):
            objects = {**target.saved.others, "noise": target.noise}
            for name, each in objects.items():
                yield name, each.state_dict(), each.load_state_dict
            yield "train_state", vars(target.train_state), vars(target.train_state).update

    def _mended(self, values: Any, prefix: Name, of: ParameterPart | None) -> Any:
        """Return a copy of nested values with the saved ones under the wrong names."""
        mended = copy.copy(values)
        for key, value, path in reversed([*items(values, prefix)]):  # of a list the last items go first
            if is_gone_into(value):
                mended[key] = self._mended(value, path, of)
                is_removed = bool(value) and not mended[key]
            else:
                is_removed = path in self.names and path not in self.saved
                if path in self.names and not is_removed:
                    mended[key] = self._as_saved(path, value, of)
            if is_removed:
                del mended[key]
        return mended

    def _as_saved(self, name: Name, current: Any, of: ParameterPart | None) -> Any:
        """Return a saved value, in the `current` tensor if that is possible."""
        leaf = self.saved[name]
        if not isinstance(leaf, TensorLeaf | DigestedLeaf):
            return copy.deepcopy(leaf)
        extent = leaf.extent
        if of and extent.shape and extent.shape == of.extent.shape:
            extent = of.extent
            if getattr(current, "dtype", None) != leaf.dtype:
                current = torch.zeros_like(of.parameter, dtype=leaf.dtype)
        value = saved_part(self.saved, name, extent, self.recall)
        if value is None:
            return current
        if getattr(current, "dtype", None) != leaf.dtype:
            return value.clone()
        local = local_part(current)
        local = of.of(local) if of and extent is of.extent else local
        local.copy_(value.reshape(local.shape))
        return current
