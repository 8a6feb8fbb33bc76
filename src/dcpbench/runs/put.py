"""The inverse of a snapshot: put values into a run, also those of another run, or different ones.

A value lies in a tensor, which is overwritten in place, or in a container: the entries of a parameter in an
optimizer, the options of a group, the state of an object.
"""

import copy
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from dcpbench.compare.controls import perturb, perturb_model, perturb_optimizer, perturbed, perturbed_leaf
from dcpbench.compare.leaves import ABSENT_LEAF, TensorReader, same_leaf, same_leaves, saved_part
from dcpbench.compare.whole_tensors import Exchange, assembled
from dcpbench.core.state import Name, StatePart, names_with_texts, text_of
from dcpbench.runs.own_run import OwnRun
from dcpbench.runs.run import Run
from dcpbench.state.layout import Extent, ParameterPart, extent_of
from dcpbench.state.snapshot import (
    DigestedLeaf,
    EmptyShard,
    Leaf,
    Leaves,
    Slot,
    State,
    TensorLeaf,
    entries_of,
    extra_states,
    has_content,
    is_container,
    local_part,
    map_leaves,
    named_parts,
    names_parameters,
    parts_of_each,
    retained,
    without_prefix,
)
from dcpbench.workloads.optimizers import each_optimizer

Unchanged = Mapping[StatePart, Collection[Name]]
"""Names, by part, of what cannot be changed in a load target."""
_REPLACED = ("noise", "tensor_object", "train_state")
"""Objects that a run replaces when it forgets its state."""


def slots_of(run: Run) -> dict[StatePart, list[Slot]]:
    """Return the containers that the values of a run lie in, by part."""
    return {
        StatePart.model: [*extra_states(run.model)],
        StatePart.optimizer: [*_of_optimizer(run)],
        **run.slots(),
    }


def _of_optimizer(run: Run) -> Iterator[Slot]:
    known, number = parts_of_each(named_parts(run.model)), 0
    for optimizer in each_optimizer(run.optimizer):
        state = optimizer.state
        for group in optimizer.param_groups:
            for at, parameter in enumerate(group["params"]):
                alone = {f"group{number}.{at}": ParameterPart(parameter, extent_of(parameter))}
                read, put = partial(_entries, state, parameter), partial(state.__setitem__, parameter)
                for fqn, part in known.get(id(parameter), alone).items():
                    yield Slot(("state", fqn), read, put, part)
            number += 1
        for owner in [owner for owner in state if not isinstance(owner, torch.Tensor)]:
            yield Slot(("state", str(owner)), partial(state.get, owner), partial(state.__setitem__, owner))
    for number, group in enumerate(run.optimizer.param_groups):
        yield Slot(("param_groups", number), partial(_options, group), group.update)


def _entries(state: Mapping[Any, Any], parameter: Any) -> Any:
    return state.get(parameter) or {}


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: option for key, option in group.items() if key != "params"}


def put(
    run: Run, state: State, read_saved: Callable[[StatePart, Name], torch.Tensor | None] = lambda *_: None
) -> State:
    """Put leaves into a run; return those that could not be set. A name whose leaf is `ABSENT` is removed.

    Args:
        read_saved: reads a full tensor, if only its digest or another part than this rank's was kept.
    """
    before, slots = run.live_state(), slots_of(run)
    for part, leaves in state.items():
        _Put(leaves, partial(read_saved, part)).into(before.get(part, {}), slots.get(part, ()))
    after, left = run.live_state(), State()
    for part, leaves in state.items():
        now, reads = after.get(part, {}), partial(read_saved, part)
        left[part] = {
            name: leaf
            for name, leaf in leaves.items()
            if not _is_set(name, leaf, now.get(name, ABSENT_LEAF), reads)
        }
    return left


def put_saved(
    run: Run,
    saved: State,
    texts: Mapping[StatePart, Container[str]],
    read_saved: Callable[[StatePart, Name], torch.Tensor | None],
) -> State:
    """Put the saved leaves of names with these texts into a run, as `put` does; a name that was not saved is
    removed."""
    live, due = run.live_state(), State()
    for part, of_part in texts.items():
        names = names_with_texts(saved[part] | live.get(part, {}), of_part)
        due[part] = {name: saved[part].get(name, ABSENT_LEAF) for name in names}
    return put(run, due, read_saved)


def _is_set(name: Name, leaf: Leaf, now: Leaf, read_saved: TensorReader) -> bool:
    if isinstance(leaf, EmptyShard) and now is ABSENT_LEAF:
        return True
    leaf, now = _held(leaf), _held(now)
    are_tensors = isinstance(leaf, TensorLeaf | DigestedLeaf) and isinstance(now, TensorLeaf)
    if are_tensors and leaf.extent != now.extent:
        full_part = _tensor(name, leaf, now.extent, read_saved)
        return full_part is not None and same_leaf(
            name, replace(now, local=full_part.reshape(now.local.shape)), now
        )
    return same_leaf(name, leaf, now)


def _held(leaf: Leaf) -> Leaf:
    return leaf.leaf if isinstance(leaf, EmptyShard) else leaf


def _tensor(name: Name, leaf: Leaf, extent: Extent, read_saved: TensorReader) -> torch.Tensor | None:
    """Return the part of a tensor that has this extent; None if it is not known, or if the checkpoint has
    other content than what was saved."""
    if isinstance(leaf, DigestedLeaf):
        full = read_saved(name)
        return extent.take(full) if full is not None and has_content(leaf, full) else None
    return saved_part({name: leaf}, name, extent, read_saved)


@dataclass(frozen=True)
class _Put:
    """Leaves of a part of the state, by name, to be put into a run."""

    leaves: Leaves
    read_saved: TensorReader

    @torch.no_grad()
    def into(self, live: Leaves, slots: Iterable[Slot]) -> None:
        """Copy tensors in place; replace other values, and what is missing, in their containers. A user's
        object that refuses its values keeps its own."""
        for name in self.leaves.keys() & live.keys():
            if isinstance(there := _held(live[name]), TensorLeaf):
                tensor = _tensor(name, _held(self.leaves[name]), there.extent, self.read_saved)
                if tensor is not None and tensor.dtype == there.dtype:
                    there.local.copy_(tensor.reshape(there.local.shape))
        values = [name for name, leaf in self.leaves.items() if not names_parameters(name, leaf)]
        for slot in slots:
            prefix = slot.prefix
            if names := [name for name in values if name[: len(prefix)] == prefix]:
                _offer(slot, partial(self._changed, names, slot))

    def _changed(self, names: Sequence[Name], slot: Slot, values: Any) -> Any:
        """Return the values of a container with the leaves of these names."""
        prefix = slot.prefix
        if prefix in names and self.leaves[prefix] is not ABSENT_LEAF:  # as the extra state of a module
            return self._value(prefix, values, slot.like)
        values = values if is_container(values) else {}
        changed, present = self._within(values, slot), {name for *_, name in entries_of(values, prefix)}
        for name in names:
            if name not in present and name[:-1] == prefix and self.leaves[name] is not ABSENT_LEAF:
                changed[name[-1]] = self._value(name, None, slot.like)
        return changed

    def _within(self, values: Any, slot: Slot) -> Any:
        """Return a copy of nested values with the leaves that are in it."""
        changed = copy.copy(values)
        for key, value, name in reversed(
            [*entries_of(values, slot.prefix)]
        ):  # of a list the last items go first
            if is_container(value):
                changed[key] = self._within(value, slot._replace(prefix=name))
                is_removed = bool(value) and not changed[key]
            else:
                is_removed = self.leaves.get(name) is ABSENT_LEAF
                if name in self.leaves and not is_removed:
                    changed[key] = self._value(name, value, slot.like)
            if is_removed:
                del changed[key]
        return changed

    def _value(self, name: Name, current: Any, like: ParameterPart | None) -> Any:
        """Return a value, in the `current` tensor if that is possible."""
        leaf = _held(self.leaves[name])
        if not isinstance(leaf, TensorLeaf | DigestedLeaf):
            return copy.deepcopy(leaf)
        extent = leaf.extent
        if like and extent.shape and extent.shape == like.extent.shape:
            extent = like.extent
            if getattr(current, "dtype", None) != leaf.dtype:
                current = torch.zeros_like(like.parameter, dtype=leaf.dtype)
        tensor = _tensor(name, leaf, extent, self.read_saved)
        if tensor is None:
            return current
        if getattr(current, "dtype", None) != leaf.dtype:
            return tensor.clone()
        local = local_part(current)
        local = like.of(local) if like and extent is like.extent else local
        local.copy_(tensor.reshape(local.shape))
        return current


def _offer(slot: Slot, made: Callable[[Any], Any]) -> None:
    """Put into a container what is built from its values. A user's object that refuses it keeps its own."""
    values = slot.read()
    before = None if slot.like else copy.deepcopy(values)
    try:
        slot.put(made(values))
        slot.read()
    except Exception:
        if slot.like:
            raise
        with suppress(Exception):
            slot.put(before)


def perturb_run(run: Run, seed: int) -> Unchanged:
    """Change everything in a run that a load restores. Return the names of what stays as it was, such as what
    a user's object refuses."""
    before = {part: retained(leaves) for part, leaves in run.extra().items()}
    run.forget(seed)
    unchanged: dict[StatePart, set[Name]] = {
        StatePart.model: perturb_model(run.model, seed, run.exclusions.leaves_out),
        StatePart.optimizer: perturb_optimizer(run.optimizer, seed),
    }
    of_model = {*map(id, run.model.parameters())}
    perturb([parameter for parameter in run.trained_parameters if id(parameter) not in of_model], seed)
    for slot in extra_states(run.model):
        held = retained(slot.leaves(slot.read()))
        if not run.exclusions.leaves_out(str(slot.prefix[0])):
            _offer(slot, perturbed)
        unchanged[StatePart.model] |= same_leaves(held, slot.leaves(slot.read()))
    slots = run.slots()
    for slot in (*slots.get(StatePart.scheduler, ()), *slots.get(StatePart.extra, ())):
        if slot.prefix[0] not in _REPLACED:
            _offer(slot, perturbed)
    if isinstance(run, OwnRun):
        run.component.forget(seed)
    unchanged |= {part: same_leaves(before[part], leaves) for part, leaves in run.extra().items()}
    return unchanged | ({StatePart.extra: {*attributes}} if (attributes := run.attributes()) else {})


def change_again(
    run: Run, saved: State, unchanged: Unchanged, missed: Set[tuple[StatePart, str]]
) -> Unchanged:
    """Change what `perturb_run` has made equal to the saved state. Return what is unchanged, with what a
    user's object keeps.

    Args:
        missed: the parts and the texts of the names that a control has missed.
    """
    kept = dict(unchanged)
    for part in {part for part, _ in missed}:
        live, texts = run.live_state()[part], {name for of, name in missed if of is part}
        leaves = {name: saved[part][name] for name in names_with_texts(saved[part], texts)}
        equal = same_leaves(leaves, live).difference(kept.get(part, ()))
        put(run, {part: {name: perturbed_leaf(live[name], text_of(name), slice(None)) for name in equal}})
        same = same_leaves(leaves, run.live_state()[part])
        kept[part] = {*kept.get(part, ())}.difference(leaves) | same  # what differs needs no changed copy
    return kept


@torch.no_grad()
def copy_tensors(run: OwnRun, plain: OwnRun, exchange: Exchange) -> dict[Name, torch.Tensor]:
    """Copy the tensors of a run, whose parts are on its ranks, to an unwrapped one, and return them in full;
    collective."""
    full = assembled(run.trained_state(), exchange)
    for name, leaf in plain.trained_state().items():
        if name in full:
            leaf.local.copy_(full[name])
    return full


def copy_state(run: OwnRun, plain: OwnRun) -> None:
    """Copy the state of a run, whose parts are on its ranks, to an unwrapped one; collective."""
    full, held = copy_tensors(run, plain, run.world.exchange_of(run.model)), slots_of(run)
    group_of = {
        id(parameter): group for group in plain.optimizer.param_groups for parameter in group["params"]
    }

    def copied(part: ParameterPart, value: Any, name: Name) -> Any:
        if name not in full:
            return copy.deepcopy(value)
        group, device = group_of[id(part.parameter)], part.parameter.device
        if not full[name].ndim and not (group.get("capturable") or group.get("fused")):
            device = value.device  # a step counter, which torch keeps on the CPU
        return full[name].to(device, copy=True)

    for part, slots in slots_of(plain).items():
        values = {slot.prefix: slot.read() for slot in held[part]}
        for slot in slots if part is not StatePart.random else ():
            saved = values.get(slot.prefix)
            if slot.like is None:
                slot.put(copy.deepcopy(saved))
            elif saved := saved or {
                name[-1]: full_tensor for name, full_tensor in without_prefix(full, slot.prefix).items()
            }:
                slot.put(map_leaves(saved, partial(copied, slot.like), slot.prefix))
    plain.random.copy_from(run.random)
