"""A checkpoint together with the state that it must bring back."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

from dcpbench.checkpointers.base import Checkpointer, PendingSave
from dcpbench.core.mismatch import Mismatch
from dcpbench.core.rank_report import Compared
from dcpbench.verify.compare_layouts import compare_state
from dcpbench.verify.perturb import compared_names, unlike
from dcpbench.verify.process_state import OpenFiles
from dcpbench.verify.snapshot import Leaves
from dcpbench.workloads.run_state import Keys, State, as_saved, key_of
from dcpbench.workloads.training_run import TrainingRun

Recall = Callable[[str], torch.Tensor | None]
"""What a checkpoint holds under a name: the whole tensor, on the CPU; None if there is none."""


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

    def __str__(self) -> str:
        return f"in the checkpoint of step {self.step}{self.how}"

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
        return compare_state(self.state[check], actual, group, recall, closely, self.by_content)

    def control(self, check: str, other: Leaves, group: dist.ProcessGroup | None) -> Compared:
        """Run the negative control of a comparison, with a state in which everything is different."""
        found = self.compare(check, other, group, closely=False)
        return Compared.of((), found, compared_names(self.state[check]))

    def compared(
        self, check: str, actual: Leaves, group: dist.ProcessGroup | None, recall: Recall | None = None
    ) -> Compared:
        """Compare a state with what was saved; the control is a copy in which everything is different."""
        control = self.control(check, unlike(self.state[check], actual), group)
        return replace(control, found=self.compare(check, actual, group, recall))


@dataclass(kw_only=True)
class SavedCheckpoint(Checkpoint):
    """One that this stage has saved, with the keys that it has to have, its save and the number of that;
    `files` has on rank 0 when its save reported success (`time.time`) and what its files were then, `opened`
    what was open before it."""

    source: TrainingRun
    keys: Keys
    pending: PendingSave
    number: int
    files: Future[tuple[float, Mapping[str, str]]]
    opened: OpenFiles
