"""A checkpoint together with the state that a load has to restore."""

import math
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from dcpbench.checkpointers.base import AtSuccess, Checkpointer, PendingSave
from dcpbench.compare.across_layouts import compare_across
from dcpbench.compare.leaves import TensorReader, compare, saved_part
from dcpbench.core.mismatch import Mismatch, Place
from dcpbench.core.rank_report import Compared
from dcpbench.core.state import CHECK_OF, StatePart, key_of, text_of
from dcpbench.formats.audit import Entry
from dcpbench.runs.run import Run
from dcpbench.state import snapshot
from dcpbench.state.snapshot import (
    DigestedLeaf,
    Leaf,
    Leaves,
    State,
    TensorLeaf,
    expected_entries,
)

StateByKey = dict[StatePart, dict[str, Leaf]]
"""A state by the flattened keys of a checkpoint."""


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

    @property
    def is_small(self) -> bool:
        """Whether no tensor of the model is large; the same on every rank."""
        leaves = self.state[StatePart.model].values()
        tensors = (leaf for leaf in leaves if isinstance(leaf, TensorLeaf | DigestedLeaf))
        sizes = (math.prod(leaf.extent.shape) * leaf.dtype.itemsize for leaf in tensors)
        return all(size <= snapshot.LARGE_BYTES for size in sizes)

    def expected_entries(self, extra: Leaves | None = None) -> dict[str, Entry]:
        """Return the entries that its save has to write on this rank, by flattened key; `extra` is what is
        saved in addition to `as_saved`."""
        expected = expected_entries(extra or {})
        for leaves in self.keyed(self.as_saved).values():
            expected |= expected_entries(leaves)
        return expected

    def state_of_one_tensor(self) -> dict[str, Any]:
        """Return a state for a load of a single tensor of it: a small one, of an object if there is one."""
        by_key = self.by_key
        *_, key, leaf = min(
            (CHECK_OF[part] != "extra_equal", key.count("."), math.prod(leaf.extent.shape), key, leaf)
            for part in by_key.keys() - {StatePart.flags}
            for key, leaf in by_key[part].items()
            if isinstance(leaf, TensorLeaf | DigestedLeaf) and leaf.extent.numel
        )
        first, _, rest = key.partition(".")
        return {first: {rest: torch.empty(leaf.extent.shape, dtype=leaf.dtype)}}

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
        of, before, now = StatePart(part), dict[str, torch.Tensor](), dict[str, torch.Tensor]()
        saved, read_saved = self.state.get(of, {}), self.reader_of(of, checkpointer)
        for name, leaf in run.live_state()[of].items():
            if isinstance(leaf, TensorLeaf) and leaf.extent.numel:
                stored = saved_part(saved, name, leaf.extent, read_saved)
                if stored is not None:
                    before[text_of(name)] = stored.reshape(leaf.local.shape).to(leaf.local.device)
                    now[text_of(name)] = leaf.local
        return before, now

    def reader_of(self, part: StatePart, checkpointer: Checkpointer) -> TensorReader:
        """Return a function that reads a tensor by its name in a part; each rank may call it alone."""
        return lambda name: checkpointer.read_tensor(self.checkpoint_id, key_of(part, name))

    def compare(
        self,
        saved: Leaves,
        actual: Leaves,
        group: dist.ProcessGroup | None,
        read_saved: TensorReader | None = None,
        closely: bool = True,
    ) -> list[Mismatch]:
        """Compare a live state with a saved one of the same layout as this checkpoint's; collective over
        `group` if it is compared by content.

        Args:
            read_saved: reads the saved tensor, to report where a large one differs and by how much.
            closely: report places and distances, and not only names.
        """
        read_saved = read_saved if closely else None
        if self.by_content:
            return compare_across(saved, actual, group, read_saved)
        return compare(saved, actual, read_saved, closely)


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
    keys: dict[str, Entry]
    in_files: StateByKey
    number: int
