"""The state of a run, as the checks compare it and as its checkpoints have it."""

import math
from collections.abc import Collection, Iterable
from typing import Any

import torch

from dcpbench.compare.leaves import TensorReader, same_leaves
from dcpbench.core.state import CHECK_OF, Name, StatePart, key_of, text_of
from dcpbench.formats.audit import Entry
from dcpbench.runs.attributes import ZeroOptimizer
from dcpbench.runs.own_run import OwnRun
from dcpbench.runs.run import Exclusions, Run
from dcpbench.state import snapshot
from dcpbench.state.flags import HOOKS, snapshot_flags, snapshot_gradients
from dcpbench.state.layout import Extent, ParameterParts, whole
from dcpbench.state.snapshot import (
    DigestedLeaf,
    Leaf,
    Leaves,
    TensorLeaf,
    by_parameter,
    digested,
    expected_entries,
    named_parameters,
    named_parts,
    names_parameters,
    of_kind,
    retained,
    snapshot_model,
    snapshot_nested,
    snapshot_optimizer,
)
from dcpbench.workloads.optimizers import each_optimizer
from dcpbench.workloads.parallelisms import overwritten_buffers

State = dict[StatePart, Leaves]
"""The leaves of each part."""
StateByKey = dict[StatePart, dict[str, Leaf]]
"""The same by the flattened keys of a checkpoint."""
ExpectedKeys = dict[str, Entry]
"""The keys that a checkpoint has to contain."""


def trained_state(run: OwnRun, parts: ParameterParts | None = None) -> Leaves:
    """Return the tensors of the model and of saved modules, and the state and hyperparameters of the
    optimizer; `parts` are the `named_parts` of the model, if known."""
    parts = parts or named_parts(run.model)
    model = snapshot_model(run.model, parts)
    held = {**of_kind("param", model), **of_kind("buffer", model), **run.saved.module_leaves()}
    tensors = {name: leaf for name, leaf in held.items() if isinstance(leaf, TensorLeaf)}
    optimizer = snapshot_optimizer(run.model, run.optimizer, parts)
    return tensors | {name: leaf for name, leaf in optimizer.items() if not names_parameters(name, leaf)}


def live_state(run: Run) -> State:
    """Return the state of this rank, which later steps change."""
    parts = named_parts(run.model)
    state: State = {
        StatePart.model: snapshot_model(run.model, parts),
        StatePart.optimizer: snapshot_optimizer(run.model, run.optimizer, parts),
        **run.extra(),
    }
    if not run.optimizer.param_groups:
        del state[StatePart.optimizer]
    if run.exclusions.generators != frozenset():
        state[StatePart.random] = snapshot_nested({"random": run.random.contents(run.exclusions.generators)})
    everything = {name: leaf for leaves in state.values() for name, leaf in leaves.items()}
    flags = snapshot_flags(run.model, run.optimizer, everything, not run.exclusions.leaves_gradients, parts)
    if attributes := run.attributes():
        state[StatePart.extra] = attributes
    return comparable({**state, StatePart.flags: flags}, run.exclusions)


def retained_state(run: Run) -> State:
    """Return a copy of the state of this rank; large tensors become digests."""
    return retained_copy(live_state(run))


def retained_copy(state: State) -> State:
    """Return a copy of a state; large tensors become digests."""
    return {part: retained(leaves) for part, leaves in state.items()}


def digested_above(nbytes: int, state: State) -> State:
    """Return a copied state, with digests instead of tensors if these are larger together."""
    tensors = (leaf for leaves in state.values() for leaf in leaves.values() if isinstance(leaf, TensorLeaf))
    if sum(leaf.local.nbytes for leaf in tensors) <= nbytes:
        return state
    return {part: digested(leaves) for part, leaves in state.items()}


def differing_names(state: State, later: State) -> list[Name]:
    """Return the names of what differs in another state with the same parts; digests by content."""
    return [name for part in state for name in state[part].keys() - same_leaves(state[part], later[part])]


def comparable(state: State, exclusions: Exclusions) -> State:
    """Return a state with the attributes of a trainer that are compared alone."""
    if exclusions.changing is None or StatePart.extra not in state:
        return state
    attributes = {name: leaf for name, leaf in state[StatePart.extra].items() if name in exclusions.changing}
    return {**state, StatePart.extra: attributes}


def leave_out_attributes(state: State, unsaved: State, changing: Collection[Name]) -> list[Name]:
    """Leave the attributes of a trainer out of the states of two of its runs. Return those that training
    changes and that differ, which are not compared after a load either."""
    attributes, others = (run.pop(StatePart.extra) for run in (state, unsaved))
    equal = same_leaves({name: leaf for name, leaf in attributes.items() if name in changing}, others)
    return sorted({*changing} & (attributes.keys() | others.keys()) - equal, key=text_of)


def drop_unneeded_generators(state: State, run: Run) -> None:
    """Drop the generators from a state that are not compared."""
    if run.exclusions.generators is None:
        return
    kept: set[Name] = {("random", run.random.key, name) for name in run.exclusions.generators}
    if leaves := {name: leaf for name, leaf in state.pop(StatePart.random, {}).items() if name in kept}:
        state[StatePart.random] = leaves


def restorable(state: State, run: Run) -> State:
    """Return a state without what the first step of a run makes: hooks of the model, the buffers that DDP
    overwrites on this rank, attributes that a new trainer lacks, and groups of its ZeRO optimizer."""
    overwritten = overwritten_buffers(run.model)
    made: dict[StatePart, Collection[Name]] = {
        StatePart.model: [(name,) for name in overwritten],
        StatePart.flags: [HOOKS],
    }
    if run.initial_attributes is not None:
        if any(
            isinstance(optimizer, ZeroOptimizer)
            for optimizer in (run.optimizer, *each_optimizer(run.optimizer))
        ):
            made[StatePart.optimizer] = [name for name in state[StatePart.optimizer] if name[0] != "state"]
        made[StatePart.extra] = state.get(StatePart.extra, {}).keys() - run.initial_attributes
    return {
        part: {name: leaf for name, leaf in leaves.items() if name not in made.get(part, ())}
        for part, leaves in comparable(state, run.exclusions).items()
    }


def as_saved(run: Run, saved: State) -> State:
    """Return a state as the state dicts of the run have it: under their names, and without frozen parameters
    if these are not saved."""
    state: State = {part: leaves for part, leaves in saved.items() if part is not StatePart.flags}
    if not isinstance(run, OwnRun):  # only a trainer can read its files
        return state
    if model := state.get(StatePart.model):
        parameters = named_parameters(run.model).items() if run.options.ignore_frozen_params else ()
        frozen = {name for name, parameter in parameters if not parameter.requires_grad}
        leaves_out = run.exclusions.leaves_out
        state[StatePart.model] = {
            name: leaf
            for name, leaf in model.items()
            if name[0] not in frozen and not leaves_out(str(name[0]))
        }
    if generators := state.get(StatePart.random):
        saved_random = snapshot_nested({"random": run.random.state_dict()})
        state[StatePart.random] = {name: leaf for name, leaf in generators.items() if name in saved_random}
    if optimizer := state.get(StatePart.optimizer):
        if run.options.flatten_optimizer_state_dict:
            optimizer = by_parameter(optimizer)
        state[StatePart.optimizer] = optimizer
    return state


def expected_keys(named: State, extra: Leaves | None) -> ExpectedKeys:
    """Return the keys that a save has to write on this rank: of a state under the names of its state dicts,
    and of what is saved in addition."""
    promised = expected_entries(extra or {})
    for part, leaves in named.items():
        promised |= expected_entries({key_of(part, name): leaf for name, leaf in leaves.items()})
    return promised


def saved_and_live(
    saved: Leaves, live: Leaves, read_saved: TensorReader
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return this rank's parts of the tensors that both have, as saved and as they are now, except empty
    parts; by the texts of their names.

    Args:
        read_saved: reads a full tensor from the checkpoint, if only a digest of it was kept.
    """
    before, now = {}, {}
    for name, leaf in live.items():
        if isinstance(leaf, TensorLeaf) and leaf.extent.numel:
            stored = saved_part(saved, name, leaf.extent, read_saved)
            if stored is not None:
                before[text_of(name)] = stored.reshape(leaf.local.shape).to(leaf.local.device)
                now[text_of(name)] = leaf.local
    return before, now


def full_tensors(names: Iterable[Name], read_saved: TensorReader) -> Leaves:
    """Return the tensors that `read_saved` reads by their names, without those that it does not have."""
    tensors = {name: tensor for name in names if (tensor := read_saved(name)) is not None}
    return {name: TensorLeaf(tensor, whole(tensor), None) for name, tensor in tensors.items()}


def state_of_one_tensor(by_key: StateByKey) -> dict[str, Any]:
    """Return a state for a load of a single tensor of a checkpoint: a small one, of an object if there is
    one."""
    *_, key, leaf = min(
        (CHECK_OF[part] != "extra_equal", key.count("."), math.prod(leaf.extent.shape), key, leaf)
        for part in by_key.keys() - {StatePart.flags}
        for key, leaf in by_key[part].items()
        if isinstance(leaf, TensorLeaf | DigestedLeaf) and leaf.extent.numel
    )
    first, _, rest = key.partition(".")
    return {first: {rest: torch.empty(leaf.extent.shape, dtype=leaf.dtype)}}


def saved_part(saved: Leaves, name: Name, extent: Extent, read_saved: TensorReader) -> torch.Tensor | None:
    """Return the part of a saved tensor that has this extent. If another part was kept, or only a digest, it
    is that of the checkpoint, which need not be the same."""
    leaf = saved.get(name)
    if isinstance(leaf, TensorLeaf) and leaf.extent == extent:
        return leaf.local
    if not isinstance(leaf, TensorLeaf | DigestedLeaf):
        return None
    full = read_saved(name)
    return extent.take(full) if full is not None and tuple(full.shape) == leaf.extent.shape else None


def live_gradients(run: Run) -> Leaves:
    """Return the gradients of this rank."""
    return snapshot_gradients(named_parts(run.model))


def is_small(state: State) -> bool:
    """Return whether no tensor of the model is large; the same on every rank."""
    parts = (leaf for leaf in state[StatePart.model].values() if isinstance(leaf, TensorLeaf | DigestedLeaf))
    return all(math.prod(leaf.extent.shape) * leaf.dtype.itemsize <= snapshot.LARGE_BYTES for leaf in parts)
