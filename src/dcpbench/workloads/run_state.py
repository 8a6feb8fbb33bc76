"""The state of a run, as the checks compare it and as its checkpoints have it."""

import math
from collections.abc import Mapping
from dataclasses import replace

from dcpbench.verify import snapshot
from dcpbench.verify.audit import Entry
from dcpbench.verify.flags import HOOKS, snapshot_flags
from dcpbench.verify.snapshot import (
    DigestedLeaf,
    Leaves,
    TensorLeaf,
    by_parameter,
    expected_of,
    named_parameters,
    named_parts,
    retained,
    snapshot_model,
    snapshot_nested,
    snapshot_optimizer,
)
from dcpbench.workloads.training_run import TrainingRun

State = dict[str, Leaves]
"""The leaves that each equality check compares, by check."""
Keys = dict[str, Entry]
"""The keys that a checkpoint has to contain."""

_PREFIXES = {"model_equal": "model.", "optim_equal": "optimizer."}
"""The prefix of a checkpoint's keys, by the check of the values there."""

RANDOM = "random_equal"
"""The check of random generators."""

FLAGS = "flags_equal"
"""The check of what no checkpoint contains."""


def key_of(check: str, name: str, numbers: Mapping[str, str]) -> str:
    """Return the flattened key for a name that a check has; `numbers` are those of parameters by FQN, if the
    optimizer state is saved under numbers."""
    if numbers and check == "optim_equal" and name.startswith("state."):
        fqn, entry = name.removeprefix("state."), ""
        while fqn and fqn not in numbers:
            fqn, _, last = fqn.rpartition(".")
            entry = f".{last}{entry}"
        name = f"state.{numbers[fqn]}{entry}" if fqn else name
    return f"{_PREFIXES.get(check, '')}{name}"


def live_state(run: TrainingRun) -> State:
    """Return the state of this rank, which later steps change."""
    parts = named_parts(run.model)
    state = {
        "model_equal": snapshot_model(run.model, parts),
        "optim_equal": snapshot_optimizer(run.model, run.optimizer, parts),
        "extra_equal": snapshot_nested(run.objects()) | run.component.saved.leaves() | run.saved.leaves(),
    }
    if run.random.kept:
        state[RANDOM] = snapshot_nested({"random": run.random.contents()})
    everything = {name: leaf for leaves in state.values() for name, leaf in leaves.items()}
    return {**state, FLAGS: snapshot_flags(run.model, run.optimizer, everything, run.clears_gradients, parts)}


def retained_state(run: TrainingRun) -> State:
    """Return a copy of the state of this rank; large tensors become digests."""
    return retained_copy(live_state(run))


def retained_copy(state: State) -> State:
    """Return a copy of a state; large tensors become digests."""
    return {check: retained(leaves) for check, leaves in state.items()}


def before_a_step(state: State) -> State:
    """Return a state without the hooks of the model, which can install them in its first step."""
    flags = state.get(FLAGS, {})
    return {**state, FLAGS: {name: leaf for name, leaf in flags.items() if name != HOOKS}} if flags else state


def as_saved(run: TrainingRun, saved: State) -> State:
    """Return a state as the state dicts of the run have it: under their names, and without frozen parameters
    if these are not saved."""
    state = {check: leaves for check, leaves in saved.items() if check != FLAGS}
    if run.options.ignore_frozen_params:
        frozen = {name for name, value in named_parameters(run.model).items() if not value.requires_grad}
        state["model_equal"] = {
            name: leaf for name, leaf in saved["model_equal"].items() if name not in frozen
        }
    if run.left_out:
        state["model_equal"] = {
            name: leaf for name, leaf in state["model_equal"].items() if not run.is_left_out(name)
        }
    if RANDOM in state:
        saved_random = snapshot_nested({"random": run.random.state_dict()})
        state[RANDOM] = {name: leaf for name, leaf in state[RANDOM].items() if name in saved_random}
    if run.options.flatten_optimizer_state_dict:
        state["optim_equal"] = by_parameter(saved["optim_equal"])
    if numbers := run.numbers:
        state["optim_equal"] = {
            name: [int(numbers[fqn]) for fqn in leaf] if name.endswith(".params") else leaf
            for name, leaf in saved["optim_equal"].items()
        }
    return state


def promised_keys(run: TrainingRun, saved: State, extra: Leaves | None) -> Keys:
    """Return the keys that a save of a run has to write on this rank; `extra` is what is saved in
    addition."""
    promised, numbers = expected_of(extra or {}), run.numbers
    for check, leaves in as_saved(run, saved).items():
        promised |= {key_of(check, name, numbers): entry for name, entry in expected_of(leaves).items()}
    return promised


def buffers_of(leaves: Leaves) -> Leaves:
    """Return the buffers of a snapshot, on the CPU, to send them to other ranks."""
    return {
        name: replace(leaf, local=leaf.local.cpu()) if isinstance(leaf, TensorLeaf) else leaf
        for name, leaf in snapshot.of_kind("buffer", leaves).items()
    }


def is_small(state: State) -> bool:
    """Return whether no tensor of the model is large; the same on every rank."""
    parts = (leaf for leaf in state["model_equal"].values() if isinstance(leaf, TensorLeaf | DigestedLeaf))
    return all(math.prod(part.extent.shape) * part.dtype.itemsize <= snapshot.LARGE_BYTES for part in parts)
