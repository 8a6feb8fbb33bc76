"""The state of a run as comparisons look at it, and as its checkpoints have it."""

import math
from collections.abc import Mapping

from dcpbench.verify import snapshot
from dcpbench.verify.audit import Entry
from dcpbench.verify.flags import snapshot_flags, snapshot_gradients
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
"""The leaves that each of the equality checks looks at, by check."""
Keys = dict[str, Entry]
"""What the keys of a checkpoint promise."""

_PREFIXES = {"model_equal": "model.", "optim_equal": "optimizer."}
"""What the keys of a checkpoint begin with, by the check that looks at what lies there."""

RANDOM = "random_equal"
"""The check that looks at what ranks draw next."""

FLAGS = "flags_equal"
"""The check that looks at what no checkpoint holds."""


def key_of(check: str, name: str, numbers: Mapping[str, str]) -> str:
    """The flattened key under which a checkpoint holds what a check looks at by this name; `numbers` are
    those of parameters by FQN, where an optimizer's state lies under these."""
    if numbers and check == "optim_equal" and name.startswith("state."):
        fqn, entry = name.removeprefix("state."), ""
        while fqn and fqn not in numbers:
            fqn, _, last = fqn.rpartition(".")
            entry = f".{last}{entry}"
        name = f"state.{numbers[fqn]}{entry}" if fqn else name
    return f"{_PREFIXES.get(check, '')}{name}"


def live_state(run: TrainingRun) -> State:
    """The state of this rank, which goes on changing."""
    parts = named_parts(run.model)
    state = {
        "model_equal": snapshot_model(run.model, parts),
        "optim_equal": snapshot_optimizer(run.model, run.optimizer, parts),
        "extra_equal": snapshot_nested(run.objects()) | run.component.leaves(),
    }
    if run.keeps_random:
        state[RANDOM] = snapshot_nested({"random": run.random_state()})
    everything = {name: leaf for leaves in state.values() for name, leaf in leaves.items()}
    return {**state, FLAGS: snapshot_flags(run.model, run.optimizer, everything, run.clears_gradients, parts)}


def retained_state(run: TrainingRun) -> State:
    """The state of this rank as it is now, whatever becomes of it."""
    return {check: retained(leaves) for check, leaves in live_state(run).items()}


def as_saved(run: TrainingRun, saved: State) -> State:
    """The state of a training run as its state dicts have it: without what is frozen, where that is left out,
    and by the names that they have for it."""
    state = {check: leaves for check, leaves in saved.items() if check != FLAGS}
    if run.options.ignore_frozen_params:
        frozen = {name for name, value in named_parameters(run.model).items() if not value.requires_grad}
        state["model_equal"] = {
            name: leaf for name, leaf in saved["model_equal"].items() if name not in frozen
        }
    if run.options.flatten_optimizer_state_dict:
        state["optim_equal"] = by_parameter(saved["optim_equal"])
    if numbers := run.numbers:
        state["optim_equal"] = {
            name: [int(numbers[fqn]) for fqn in leaf] if name.endswith(".params") else leaf
            for name, leaf in saved["optim_equal"].items()
        }
    return state


def promised_keys(run: TrainingRun, saved: State, beside: Leaves | None) -> Keys:
    """The keys that a save of a training run has to have, on whichever rank that has them."""
    promised = expected_of(beside or {})
    for check, leaves in as_saved(run, saved).items():
        promised |= {key_of(check, name, run.numbers): entry for name, entry in expected_of(leaves).items()}
    return promised


def live_gradients(run: TrainingRun) -> Leaves:
    """Return the gradients that there are."""
    return snapshot_gradients(named_parts(run.model))


def retained_gradients(run: TrainingRun) -> Leaves:
    """Return copies of the gradients that there are."""
    return retained(live_gradients(run))


def is_small(state: State) -> bool:
    """Whether none of the model's tensors is large; the same on every rank."""
    parts = (leaf for leaf in state["model_equal"].values() if isinstance(leaf, TensorLeaf | DigestedLeaf))
    return all(math.prod(part.extent.shape) * part.dtype.itemsize <= snapshot.LARGE_BYTES for part in parts)
