"""Pass checkpoints and the reference run to the processes of a later stage, which may have another layout,
by files in the folder of the cell."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import torch

from dcpbench.cell import steps
from dcpbench.cell.cell import Cell
from dcpbench.cell.checkpoint import Checkpoint
from dcpbench.cell.explained import explained_in_checkpoint
from dcpbench.cell.steps import RunRecord
from dcpbench.cell.window import Window
from dcpbench.checkpointers.base import Checkpointer
from dcpbench.config.groups import Verify
from dcpbench.verify.compare import Comparison
from dcpbench.verify.compare_layouts import compare_ranks
from dcpbench.verify.snapshot import PLAIN
from dcpbench.workloads.run import Limits
from dcpbench.workloads.run_state import RANDOM, State

_NEXT_STAGE, _OF_RANK = "handover.pt", "handover-rank{}.pt"


@dataclass(frozen=True)
class LeftCheckpoint:
    """A `Checkpoint` for other processes, in a subfolder of the cell's folder.

    Args:
        files: its label and the digests of its files when its save reported success.
        overlapping: the steps of checkpoints that were in flight at the same time.
    """

    step: int
    folder: str
    state: State
    numbers: Mapping[str, str] = field(default_factory=dict)
    files: tuple[str, Mapping[str, str] | None] | None = None
    saved_as: State | None = None
    overlapping: tuple[int, ...] = ()

    @classmethod
    def of(cls, cell: Cell, checkpoint: Checkpoint, state: State, saved_as: State | None = None) -> Self:
        """Describe a checkpoint of this process."""
        folder = str(Path(checkpoint.checkpoint_id).relative_to(cell.folder))
        known = cell.files.get(checkpoint.checkpoint_id)
        beside = tuple(other.step for other in checkpoint.overlapping)
        return cls(checkpoint.step, folder, state, checkpoint.numbers, known and known[:2], saved_as, beside)

    def checkpoint(self, cell: Cell, checkpointer: Checkpointer, **options: Any) -> Checkpoint:
        """Return it as a checkpoint of this process."""
        place = str(cell.folder / self.folder)
        more = {"numbers": self.numbers, "saved_as": self.saved_as, **options}
        return Checkpoint(self.step, place, checkpointer, self.state, **more)

    def followed(self, cell: Cell, checkpointer: Checkpointer, **options: Any) -> Checkpoint:
        """Return the same, and let the end of this stage compare its files with those of when it was
        complete."""
        checkpoint = self.checkpoint(cell, checkpointer, **options)
        if self.files:
            cell.files[checkpoint.checkpoint_id] = *self.files, checkpointer
            checkpointer.note_removed(checkpoint.checkpoint_id)
        return checkpoint


@dataclass(frozen=True)
class Handover:
    """The state that a stage passes to a later one: as in `Saved`, and the steps of a trainer."""

    checkpoints: list[LeftCheckpoint]
    record: RunRecord = field(default_factory=RunRecord)
    window: Window | None = None


@dataclass(frozen=True)
class Saved:
    """The checkpoints that runs are restored from, oldest first, and the record of the reference run."""

    checkpoints: list[Checkpoint]
    record: RunRecord


def leave(cell: Cell, handover: Handover, name: str) -> None:
    """Write a file of this name in the folder of the cell."""
    torch.save(handover, cell.folder / name)


def take(cell: Cell, name: str) -> Handover:
    """Read the file of this name, which this cell wrote. It may contain any class, such as arrays, if the
    workload is a user's, or for the same rank of another process."""
    own = cell.config.workload.target is not None or cell.config.restarts
    safe: list[Any] = [Handover, LeftCheckpoint, RunRecord, Limits, *PLAIN]
    with torch.serialization.safe_globals(safe):
        handover: Handover = torch.load(cell.folder / name, weights_only=not own)
    return handover


def hand_over(cell: Cell, checkpoints: Sequence[Checkpoint], record: RunRecord) -> None:
    """Leave checkpoints and the record of the reference run to the next stage; collective. Tensors become
    digests of full tensors, which any layout can compare with. Ranks that disagree on a value are
    reported; a defect explains this if it explains what the checkpoint has."""

    def full(state: State, saved: Checkpoint | None = None) -> State:
        added: State = {}
        for check, leaves in state.items():
            added[check], compared = compare_ranks(leaves, cell.world.group)
            if compared.found and saved:
                stored = saved.read(check, {one.name for one in compared.found if one.name in leaves})
                comparisons = {check: Comparison(leaves, stored, compared)}
                named = explained_in_checkpoint(cell, "restored", saved, comparisons)
                cell.record(check, named[check], str(saved))
        return added

    with cell.phase("verify", "handover"):
        left = [LeftCheckpoint.of(cell, one, full(one.state, one)) for one in checkpoints]
        states = {step: full(state) for step, state in record.states.items()}
        _drop_cached(cell, checkpoints)
    if cell.world.rank == 0:
        leave(cell, Handover(left, replace(record, states=states)), _NEXT_STAGE)


def take_over(
    cell: Cell, checkpointer: Checkpointer, same_layout: bool
) -> tuple[list[Checkpoint], RunRecord]:
    """Return the checkpoints of the stage before, the oldest first, and the record of the reference run. The
    state of random generators is dropped under another layout, which draws other numbers."""
    handover = take(cell, _NEXT_STAGE)
    checkpoints = [left.followed(cell, checkpointer, by_content=True) for left in handover.checkpoints]
    record = handover.record
    if not same_layout:
        record.limits = replace(record.limits, generators=frozenset())
        for state in (*record.states.values(), *(one.state for one in checkpoints)):
            state.pop(RANDOM, None)
    return checkpoints, record


def leave_to_ranks(cell: Cell, saved: Saved) -> None:
    """Leave everything to a new process of each rank."""
    left = [LeftCheckpoint.of(cell, one, one.state, one.named) for one in saved.checkpoints]
    with cell.phase("verify", "left"):
        leave(cell, Handover(left, saved.record, cell.chosen), _OF_RANK.format(cell.world.rank))
        _drop_cached(cell, saved.checkpoints)


def _drop_cached(cell: Cell, checkpoints: Iterable[Checkpoint]) -> None:
    """With `verify=deep`, drop the page cache of the files on rank 0."""
    for checkpoint in checkpoints if cell.config.verify is Verify.deep and cell.world.rank == 0 else ():
        checkpoint.checkpointer.drop_cached(checkpoint.checkpoint_id)


def take_as_rank(cell: Cell) -> tuple[Cell, Saved]:
    """Return what the stage before has left to this rank, and the cell with its steps."""
    with cell.phase("verify", "left"):
        handover = take(cell, _OF_RANK.format(cell.world.rank))
    cell = replace(cell, chosen=handover.window)
    checkpointer = steps.open_checkpointer(cell)
    checkpoints = {left.step: left.followed(cell, checkpointer) for left in handover.checkpoints}
    for left in handover.checkpoints:
        checkpoints[left.step].overlapping += (checkpoints[step] for step in left.overlapping)
    return cell, Saved([*checkpoints.values()], handover.record)
