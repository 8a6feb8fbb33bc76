"""Pass checkpoints and the reference run to the processes of a later stage, which may have another layout,
by files in the folder of the cell."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from dcpbench.cell.cell import Cell
from dcpbench.cell.checkpoint import Checkpoint, SavedCheckpoint
from dcpbench.cell.explained import explained_restored
from dcpbench.cell.steps import RunRecord
from dcpbench.checkpointers.base import Checkpointer
from dcpbench.config.groups import Verify
from dcpbench.verify.compare_layouts import compare_ranks
from dcpbench.verify.files import FileDigests
from dcpbench.verify.snapshot import PLAIN
from dcpbench.workloads.run_state import RANDOM, State, as_saved, key_of
from dcpbench.workloads.training_run import TrainingRun

_NEXT_STAGE = "handover.pt"
NEWEST, NEWEST_OF_RANK = "newest.pt", "newest-rank{}.pt"
"""The newest checkpoint, for a fresh process; of a user's trainer one file for each rank."""


@dataclass(frozen=True)
class LeftCheckpoint:
    """A `Checkpoint` for other processes, in a subfolder of the cell's folder; `files` are its label and the
    digests of its files when its save reported success."""

    step: int
    folder: str
    state: State
    numbers: Mapping[str, str] = field(default_factory=dict)
    files: tuple[str, FileDigests | None] | None = None

    @classmethod
    def of(cls, cell: Cell, checkpoint: Checkpoint, state: State) -> "LeftCheckpoint":
        """Describe a checkpoint of this process."""
        folder = str(Path(checkpoint.checkpoint_id).relative_to(cell.folder))
        known = cell.files.get(checkpoint.checkpoint_id)
        return cls(checkpoint.step, folder, state, checkpoint.numbers, known and known[:2])

    def checkpoint(self, cell: Cell, checkpointer: Checkpointer, **options: Any) -> Checkpoint:
        """Return it as a checkpoint of this process."""
        place = str(cell.folder / self.folder)
        if self.files:
            cell.files[place] = *self.files, checkpointer
        return Checkpoint(self.step, place, checkpointer, self.state, numbers=self.numbers, **options)


@dataclass(frozen=True)
class Handover:
    """The state that a stage passes to a later one: its checkpoints, oldest first, the record of the
    reference run, and which random generators that run keeps (as in `TrainingRun`)."""

    checkpoints: list[LeftCheckpoint]
    record: RunRecord = field(default_factory=RunRecord)
    keeps_random: bool | frozenset[str] = True


def leave(cell: Cell, handover: Handover, name: str) -> None:
    """Write a file of this name in the folder of the cell."""
    torch.save(handover, cell.folder / name)


def take(cell: Cell, name: str) -> Handover:
    """Read the file of this name, which this cell wrote. It may contain any class if the workload is a
    user's, such as arrays."""
    safe: list[Any] = [Handover, LeftCheckpoint, RunRecord, *PLAIN]
    with torch.serialization.safe_globals(safe):
        handover: Handover = torch.load(cell.folder / name, weights_only=cell.config.workload.target is None)
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
                found = explained_restored(cell, saved, {check: compared}, {check: stored})
                cell.record(check, found[check], str(saved))
        return added

    with cell.phase("verify", "handover"):
        left = [LeftCheckpoint.of(cell, one, full(one.state, one)) for one in checkpoints]
        states = {step: full(state) for step, state in record.states.items()}
    if cell.world.rank == 0:
        leave(cell, Handover(left, replace(record, states=states, unrestored={})), _NEXT_STAGE)


def take_over(
    cell: Cell, checkpointer: Checkpointer, same_layout: bool
) -> tuple[list[Checkpoint], RunRecord]:
    """Return the checkpoints of the stage before, the oldest first, and the record of the reference run. The
    state of random generators is dropped under another layout, which draws other numbers."""
    handover = take(cell, _NEXT_STAGE)
    checkpoints = [one.checkpoint(cell, checkpointer, by_content=True) for one in handover.checkpoints]
    states = [*handover.record.states.values(), *(one.state for one in checkpoints)]
    for state in () if same_layout else states:
        state.pop(RANDOM, None)
    return checkpoints, handover.record


def leave_newest(cell: Cell) -> None:
    """At the end of a stage, leave its newest complete checkpoint to a fresh process, and drop the page cache
    of its files; collective."""
    if cell.config.verify is not Verify.deep or cell.config.own_trainer or not cell.complete:
        return
    (newest,) = cell.complete
    left = stored(cell, newest)
    with cell.phase("verify", "left"):
        if cell.world.rank == 0:
            leave(cell, Handover([left]), NEWEST)
            newest.checkpointer.drop_cached(newest.checkpoint_id)


def stored(cell: Cell, saved: SavedCheckpoint) -> LeftCheckpoint:
    """Describe a checkpoint to a process that did not save it; collective. Values on which the ranks disagree
    are left out: no load can restore them on all ranks, which other checks report."""
    state: State = {}
    with cell.phase("verify", "left"):
        for check, leaves in as_saved(saved.source, saved.state).items():
            names = (name for name in leaves if key_of(check, name, saved.numbers) in saved.keys)
            full, compared = compare_ranks({name: leaves[name] for name in names}, cell.world.group)
            differing = {finding.name for finding in compared.found}
            if agreed := {name: leaf for name, leaf in full.items() if name not in differing}:
                state[check] = agreed
    return LeftCheckpoint.of(cell, saved, state)


def leave_to_trainer(cell: Cell, newest: Checkpoint, run: TrainingRun, record: RunRecord) -> None:
    """Leave the newest checkpoint of a user's trainer, and the record of the reference run, to a fresh
    process of each rank, and drop the page cache of its files."""
    if cell.config.verify is not Verify.deep:
        return
    left = [LeftCheckpoint.of(cell, newest, newest.state)]
    handover = Handover(left, replace(record, unrestored={}), run.random.kept)
    with cell.phase("verify", "left"):
        leave(cell, handover, NEWEST_OF_RANK.format(cell.world.rank))
        if cell.world.rank == 0:
            newest.checkpointer.drop_cached(newest.checkpoint_id)
