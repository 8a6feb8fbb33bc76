"""A checkpoint together with the state that a load has to restore."""

import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist

from dcpbench.checkpointers.base import AtSuccess, Checkpointer, PendingSave
from dcpbench.core.mismatch import Mismatch
from dcpbench.core.rank_report import Compared
from dcpbench.core.state import StatePart
from dcpbench.verify.compare_layouts import compare_state
from dcpbench.verify.snapshot import Leaves
from dcpbench.workloads.run import Run
from dcpbench.workloads.run_state import (
    Keys,
    State,
    as_saved,
    before_a_step,
    full_tensors,
    key_of,
    live_state,
    one_tensor,
    saved_and_live,
)

Recall = Callable[[str], torch.Tensor | None]
"""Returns the full tensor that a checkpoint has under a name, on the CPU; None if there is none."""


def whole_tensors(parts: Iterable[Leaves]) -> set[str]:
    """Return the names of the tensors that this rank has completely."""
    leaves = ((name, getattr(leaf, "extent", None)) for part in parts for name, leaf in part.items())
    return {name for name, extent in leaves if extent and extent.numel == math.prod(extent.shape)}


def read_elsewhere(rank: int, here: set[str], everywhere: Sequence[set[str]]) -> set[str]:
    """Return the keys of tensors that this rank has completely and another one that has them reads from the
    files: the ranks share the work.

    Args:
        here: the keys of tensors that this rank has completely.
        everywhere: the same of each rank.
    """
    having = {key: [other for other, keys in enumerate(everywhere) if key in keys] for key in here}
    readers = {key: ranks[zlib.crc32(key.encode()) % len(ranks)] for key, ranks in having.items()}
    return {key for key, reader in readers.items() if reader != rank}


@dataclass
class Checkpoint:
    """A checkpoint and the state that a load of it has to restore.

    Args:
        step: the training step after which it was saved.
        checkpoint_id: its path.
        checkpointer: reads it.
        state: what was saved, by part: this rank's parts or, from another layout, digests of full tensors.
        by_content: compare full tensors, because the load target has another layout.
        source: the live run that was saved, if it is in this process. It has trained on since: `tensors`
            returns the values that were saved.
        numbers: parameter numbers by FQN, if the optimizer state is saved under numbers.
        saved_as: the state under the names that its state dicts have, if the live run is in another process.
        how: a suffix for messages, if it was saved or is loaded in an unusual way (`, saved again`).
        overlapping: checkpoints whose saves were in flight at the same time.
    """

    step: int
    checkpoint_id: str
    checkpointer: Checkpointer
    state: State
    by_content: bool = False
    source: Run | None = None
    numbers: Mapping[str, str] = field(default_factory=dict)
    saved_as: State | None = None
    how: str = ""
    overlapping: list["Checkpoint"] = field(default_factory=list)

    def __getstate__(self) -> dict[str, Any]:
        """Return it without its checkpointer, which each process opens for itself."""
        return {name: value for name, value in vars(self).items() if name != "checkpointer"}

    def plain(self, state: State, by_content: bool = False) -> "Checkpoint":
        """Return plain data, which can be pickled, for other processes: this state, and no live run."""
        place = self.step, self.checkpoint_id, self.checkpointer
        saved_as = None if by_content else self.named
        return Checkpoint(*place, state, by_content, numbers=self.numbers, saved_as=saved_as)

    def __str__(self) -> str:
        return f"in the checkpoint of step {self.step}{self.how}"

    @property
    def named(self) -> State | None:
        """The saved state under the names that its state dicts have, if these are known."""
        return as_saved(self.source, self.state) if self.source else self.saved_as

    @property
    def by_key(self) -> State:
        """The saved state of each part, by the flattened keys of the checkpoint."""
        return self._keyed(self.named or self.state)

    def _keyed(self, state: State) -> State:
        return {
            part: {key_of(part, name, self.numbers): leaf for name, leaf in leaves.items()}
            for part, leaves in state.items()
        }

    def tensors(
        self, part: Literal["model", "optimizer"], run: Run
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Return the tensors that were saved and those of a run that has loaded them, under the same names:
        this rank's parts by FQN, without prefixes of wrappers such as DDP's `module.`. Left out are empty
        parts, and names that only one of both has. Large tensors, and all tensors that were saved under
        another layout, are read from the checkpoint; if the checkpointer cannot do that, they are left out.

        Args:
            part: `model`, with persistent buffers, or `optimizer`: `state.<FQN>.exp_avg`.
            run: the load target. Its tensors are the live ones, so do not change them.
        """
        of = StatePart(part)
        return saved_and_live(self.state.get(of, {}), live_state(run)[of], self.recall_of(of))

    def one_tensor(self) -> dict[str, Any]:
        """Return a state for a load of a single tensor."""
        return one_tensor(self.by_key)

    def recall(self, prefix: str) -> Recall:
        """Return a function that reads a tensor by its key below `prefix`; each rank may call it alone."""
        return lambda name: self.checkpointer.read_tensor(self.checkpoint_id, f"{prefix}{name}")

    def recall_of(self, part: StatePart) -> Recall:
        """Return a function that reads a tensor by its name in a part."""
        return lambda name: self.recall("")(key_of(part, name, self.numbers))

    def read(self, part: StatePart, names: Iterable[str]) -> Leaves:
        """Read the full tensors that the checkpoint has under names of a part."""
        return full_tensors(names, self.recall_of(part))

    def compare(
        self,
        saved: Leaves,
        actual: Leaves,
        group: dist.ProcessGroup | None,
        recall: Recall | None = None,
        closely: bool = True,
    ) -> list[Mismatch]:
        """Compare a live state with a saved one of the same layout as this checkpoint's; collective over
        `group` if it is compared by content.

        Args:
            recall: reads the saved tensor, to report where a large one differs and by how much.
            closely: report places and distances, and not only names.
        """
        return compare_state(saved, actual, group, recall, closely, self.by_content)


@dataclass(kw_only=True)
class SavedCheckpoint(Checkpoint):
    """A checkpoint that this stage has saved: the keys that it must contain, its save with its number from 0,
    its files when it reported success, and a function that compares what this process had open before with
    what it has open."""

    source: Run
    keys: Keys
    pending: PendingSave
    number: int
    files: Future[AtSuccess]
    still_open: Callable[[], Compared]

    @property
    def in_files(self) -> State:
        """The part of `by_key` that its files are compared with."""
        return self._keyed(as_saved(self.source, before_a_step(self.state, self.source)))
