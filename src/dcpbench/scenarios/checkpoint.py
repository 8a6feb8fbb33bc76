"""A checkpoint together with the state that it must bring back."""

import math
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch.distributed as dist

from dcpbench.checkpointers.base import Checkpointer, PendingSave
from dcpbench.core.mismatch import Mismatch
from dcpbench.verify import snapshot
from dcpbench.verify.audit import Entry
from dcpbench.verify.compare import Recall, compare
from dcpbench.verify.compare_layouts import compare_across
from dcpbench.verify.files import FileDigests
from dcpbench.verify.flags import snapshot_flags
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


def promised_keys(run: TrainingRun, saved: State, beside: Leaves | None) -> dict[str, Entry]:
    """The keys that a save of a training run has to have, on whichever rank that has them."""
    promised = expected_of(beside or {})
    for check, leaves in as_saved(run, saved).items():
        promised |= {key_of(check, name, run.numbers): entry for name, entry in expected_of(leaves).items()}
    return promised


@dataclass
class Checkpoint:
    """A checkpoint of a step and what it must bring back.

    Args:
        state: what was saved: this rank's parts, or of another layout the digests of whole tensors.
        by_content: whether parts lie otherwise where it is loaded, so that whole tensors are compared.
        source: the training run that was saved, if it is in this process.
        numbers: of parameters by FQN, where it has an optimizer's state under these.
        how: it was saved or is loaded, where that is not as usual (`, saved again`).
        beside: those whose saves were under way at the same time.
        unrestored: the state of the target before the load, where a known defect leaves some of it.
    """

    step: int
    checkpoint_id: str
    checkpointer: Checkpointer
    state: State
    by_content: bool = False
    source: TrainingRun | None = None
    numbers: Mapping[str, str] = field(default_factory=dict)
    how: str = ""
    beside: list["Checkpoint"] = field(default_factory=list)
    unrestored: State | None = None

    def __str__(self) -> str:
        return f"in the checkpoint of step {self.step}{self.how}"

    @property
    def is_small(self) -> bool:
        """Whether none of the model's tensors is large; the same on every rank."""
        leaves = self.state["model_equal"].values()
        parts = (leaf for leaf in leaves if isinstance(leaf, TensorLeaf | DigestedLeaf))
        return all(
            math.prod(part.extent.shape) * part.dtype.itemsize <= snapshot.LARGE_BYTES for part in parts
        )

    @property
    def by_key(self) -> list[Leaves]:
        """What each check looks at, by the flattened keys of a checkpoint."""
        state = as_saved(self.source, self.state) if self.source else self.state
        return [
            {key_of(check, name, self.numbers): leaf for name, leaf in leaves.items()}
            for check, leaves in state.items()
        ]

    def recall(self, prefix: str) -> Recall:
        """What it holds below a prefix of its keys; any rank may ask, by itself."""
        return lambda name: self.checkpointer.read_tensor(self.checkpoint_id, f"{prefix}{name}")

    def recall_of(self, check: str) -> Recall:
        """What it holds of what a check looks at, by the names that the check has for it."""
        return lambda name: self.recall("")(key_of(check, name, self.numbers))

    def compare(
        self,
        check: str,
        actual: Leaves,
        group: dist.ProcessGroup | None,
        recall: Recall | None = None,
        closely: bool = True,
    ) -> list[Mismatch]:
        """What of a live state is not what was saved; `recall` helps to say how large tensors differ."""
        if self.by_content:
            return compare_across(self.state[check], actual, group, recall)
        return compare(self.state[check], actual, recall, closely)


@dataclass(kw_only=True)
class SavedCheckpoint(Checkpoint):
    """One that this stage has saved, with the keys that it has to have, its save and the number of that;
    `files` has on rank 0 when its save reported success (`time.time`) and what its files were then, `opened`
    what was open before it."""

    source: TrainingRun
    keys: dict[str, Entry]
    pending: PendingSave
    number: int
    files: Future[tuple[float, FileDigests]]
    opened: Leaves
