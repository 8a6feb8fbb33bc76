"""A checkpoint together with the state that a load has to restore."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist

from dcpbench.checkpointers.base import AtSuccess, Checkpointer, PendingSave
from dcpbench.compare.across_layouts import compare_state
from dcpbench.core.mismatch import Mismatch, Place
from dcpbench.core.rank_report import Compared
from dcpbench.core.state import Name, StatePart, key_of
from dcpbench.runs.run import Run
from dcpbench.runs.run_state import (
    ExpectedKeys,
    State,
    StateByKey,
    live_state,
    saved_and_live,
)
from dcpbench.state.snapshot import Leaves


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint and the state that a load of it has to restore: plain data, which can be pickled.

    Args:
        step: the training step after which it was saved.
        checkpoint_id: its path.
        state: what was saved, by part: this rank's parts or, from another layout, digests of full tensors.
        as_saved: the state under the names that its state dicts have; empty if these are not known.
        by_content: compare full tensors, because the load target has another layout.
        how: of its `place`, if it was saved or is loaded in an unusual way (`, saved again`).
    """

    step: int
    checkpoint_id: str
    state: State
    as_saved: State = field(default_factory=dict)
    by_content: bool = False
    how: str = ""

    def __str__(self) -> str:
        return str(self.place)

    @property
    def place(self) -> Place:
        """The place at which what it contains is compared."""
        return Place("checkpoint", self.step, self.how)

    def at(self, moment: str, how: str = "") -> Place:
        """Return the place of a moment that is about this checkpoint."""
        return Place(moment, self.step, f"{self.how}{how}")

    @property
    def by_key(self) -> StateByKey:
        """The saved state of each part, by the flattened keys of the checkpoint."""
        return self.keyed(self.as_saved or self.state)

    def keyed(self, state: State) -> StateByKey:
        """Return a state by the flattened keys of the checkpoint."""
        return {
            part: {key_of(part, name): leaf for name, leaf in leaves.items()}
            for part, leaves in state.items()
        }

    def tensors(
        self, part: Literal["model", "optimizer"], run: Run, checkpointer: Checkpointer
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Return the tensors that were saved and those of a run that has loaded them, under the same names:
        this rank's parts by FQN, without prefixes of wrappers such as DDP's `module.`. Left out are empty
        parts, and names that only one of both has. Large tensors, and all tensors that were saved under
        another layout, are read by the checkpointer; if it cannot do that, they are left out.

        Args:
            part: `model`, with persistent buffers, or `optimizer`: `state.<FQN>.exp_avg`.
            run: the load target. Its tensors are the live ones, so do not change them.
        """
        of = StatePart(part)
        return saved_and_live(self.state.get(of, {}), live_state(run)[of], self.reader_of(of, checkpointer))

    def reader_of(self, part: StatePart, checkpointer: Checkpointer) -> Callable[[Name], torch.Tensor | None]:
        """Return a function that reads a tensor by its name in a part; each rank may call it alone."""
        return lambda name: checkpointer.read_tensor(self.checkpoint_id, key_of(part, name))

    def compare(
        self,
        saved: Leaves,
        actual: Leaves,
        group: dist.ProcessGroup | None,
        read_saved: Callable[[Name], torch.Tensor | None] | None = None,
        closely: bool = True,
    ) -> list[Mismatch]:
        """Compare a live state with a saved one of the same layout as this checkpoint's; collective over
        `group` if it is compared by content.

        Args:
            read_saved: reads the saved tensor, to report where a large one differs and by how much.
            closely: report places and distances, and not only names.
        """
        read_saved = read_saved if closely else None
        return compare_state(saved, actual, group, read_saved, closely, self.by_content)


class SaveInFlight(NamedTuple):
    """A save in flight.

    Args:
        checkpoint: the checkpoint that it writes.
        pending: ends when the checkpoint is complete.
        files: the files of the checkpoint when the save reported success.
        still_open: compares what this process had open before with what it has open.
        keys: those that the checkpoint must contain.
        in_files: the state, by key, that its files are compared with.
        number: of the save, from 0.
    """

    checkpoint: Checkpoint
    pending: PendingSave
    files: Future[AtSuccess]
    still_open: Callable[[], Compared]
    keys: ExpectedKeys
    in_files: StateByKey
    number: int
