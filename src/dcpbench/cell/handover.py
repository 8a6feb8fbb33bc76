"""Leave a file to the processes of the next stage, which may have another layout, in the folder of the
cell."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dcpbench.cell.cell import Cell
from dcpbench.cell.checkpoint import Checkpoint, SavedCheckpoint
from dcpbench.cell.steps import Losses
from dcpbench.checkpointers.base import Checkpointer
from dcpbench.config.groups import Verify
from dcpbench.core.rank_report import Compared
from dcpbench.verify.compare_layouts import digests
from dcpbench.verify.snapshot import PLAIN
from dcpbench.workloads.batches import batches_of
from dcpbench.workloads.run_state import RANDOM, State, as_saved, key_of
from dcpbench.workloads.training_run import TrainingRun

_NEXT_STAGE = "handover.pt"
NEWEST, NEWEST_OF_RANK = "newest.pt", "newest-rank{}.pt"
"""What is left to a fresh process: of the newest checkpoint, or of a trainer's by each rank."""


@dataclass(frozen=True)
class LeftCheckpoint:
    """A checkpoint that is left to other processes: in which folder of the cell's it is, what it must bring
    back, the numbers of parameters in it, and what it was called and its files were when it was complete."""

    step: int
    folder: str
    state: State
    numbers: Mapping[str, str] = field(default_factory=dict)
    files: tuple[str, Mapping[str, str]] | None = None

    @classmethod
    def of(cls, cell: Cell, checkpoint: Checkpoint, state: State) -> "LeftCheckpoint":
        """Make it from a checkpoint and what that must bring back."""
        folder = str(Path(checkpoint.checkpoint_id).relative_to(cell.folder))
        known = cell.files.get(checkpoint.checkpoint_id)
        return cls(checkpoint.step, folder, state, checkpoint.numbers, known and known[:2])

    def checkpoint(self, cell: Cell, checkpointer: Checkpointer, **options: Any) -> Checkpoint:
        """Return it as a checkpoint of this process."""
        place = str(cell.folder / self.folder)
        return Checkpoint(self.step, place, checkpointer, self.state, numbers=self.numbers, **options)


@dataclass(frozen=True)
class Handover:
    """What is left: checkpoints, the oldest first, what is to be known of the uninterrupted run (`Losses`),
    and which random generators it keeps."""

    checkpoints: list[LeftCheckpoint]
    continued: list[float] = field(default_factory=list)
    states: dict[int, State] = field(default_factory=dict)
    why_layout_bound: str | None = None
    computes_in: list[torch.dtype] = field(default_factory=list)
    torch_version: str = ""
    keeps_random: bool | frozenset[str] = True

    @classmethod
    def of(
        cls, checkpoints: list[LeftCheckpoint], losses: Losses, states: dict[int, State], **options: Any
    ) -> "Handover":
        """Make it from the losses of the uninterrupted run and its states, as they are left."""
        about = losses.why_layout_bound, [*losses.computes_in], losses.torch_version
        return cls(checkpoints, losses.continued, states, *about, **options)

    def losses(self, cell: Cell) -> Losses:
        """Return the losses and states to train on with."""
        data = batches_of(cell.config, cell.world.device)
        about = self.why_layout_bound, frozenset(self.computes_in), self.torch_version
        return Losses(self.continued, data, self.states, {}, *about)


def leave(cell: Cell, handover: Handover, name: str) -> None:
    """Leave a file of this name in the folder of the cell."""
    torch.save(handover, cell.folder / name)


def take(cell: Cell, name: str, any_values: bool = False) -> Handover:
    """Read the file of this name. With `any_values` it may hold those of a user's trainer; this cell wrote
    it."""
    safe: list[Any] = [Handover, LeftCheckpoint, *PLAIN]
    with torch.serialization.safe_globals(safe):
        handover: Handover = torch.load(cell.folder / name, weights_only=not any_values)
    return handover


def hand_over(cell: Cell, checkpoints: Sequence[Checkpoint], losses: Losses) -> None:
    """Leave to the next stage the digests of whole tensors and the exact small values that the checkpoints
    must bring back, and those that training on from there must come to; collective. Ranks that do not agree
    on what was saved are found here."""

    def whole(state: State, where: str | None = None) -> State:
        added: State = {}
        for check, leaves in state.items():
            added[check], wrong = digests(leaves, cell.world.group)
            if wrong and where:
                told = {finding.name: True for finding in wrong}
                cell.record(check, Compared(wrong, told, told), where)  # what is told was not missed
        return added

    with cell.phase("verify", "handover"):
        left = [LeftCheckpoint.of(cell, one, whole(one.state, str(one))) for one in checkpoints]
        states = {step: whole(state) for step, state in losses.states.items()}
    if cell.world.rank == 0:
        leave(cell, Handover.of(left, losses, states), _NEXT_STAGE)


def take_over(cell: Cell, checkpointer: Checkpointer, same_layout: bool) -> tuple[list[Checkpoint], Losses]:
    """The checkpoints of the stage before, the oldest first, and the losses to go on with; without the state
    of its ranks' random generators if this one does not have the same layout."""
    handover = take(cell, _NEXT_STAGE)
    checkpoints = [one.checkpoint(cell, checkpointer, by_content=True) for one in handover.checkpoints]
    for left, checkpoint in zip(handover.checkpoints, checkpoints, strict=True):
        if left.files:
            now = partial(checkpointer.digests, checkpoint.checkpoint_id)
            cell.files[checkpoint.checkpoint_id] = *left.files, now
    states = [*handover.states.values(), *(one.state for one in checkpoints)]
    for state in () if same_layout else states:
        del state[RANDOM]
    return checkpoints, handover.losses(cell)


def leave_newest(cell: Cell) -> None:
    """At the end of a stage, leave to the fresh process what its newest complete checkpoint must bring back,
    as digests of whole tensors and small exact values, and drop what is cached of the files; collective.
    What the ranks do not agree on no one checkpoint brings back: what they load shows that."""
    if cell.config.verify is not Verify.deep or cell.config.own_trainer or not cell.complete:
        return
    (newest,) = cell.complete
    left = stored(cell, newest)
    with cell.phase("verify", "left"):
        if cell.world.rank == 0:
            leave(cell, Handover([left]), NEWEST)
            newest.checkpointer.drop_cached(newest.checkpoint_id)


def stored(cell: Cell, saved: SavedCheckpoint) -> LeftCheckpoint:
    """What a checkpoint must bring back to a process that had no part in saving it, as digests of whole
    tensors and small exact values, without what the ranks do not agree on; collective."""
    state: State = {}
    with cell.phase("verify", "left"):
        for check, leaves in as_saved(saved.source, saved.state).items():
            names = (name for name in leaves if key_of(check, name, saved.numbers) in saved.keys)
            whole, wrong = digests({name: leaves[name] for name in names}, cell.world.group)
            differing = {finding.name for finding in wrong}
            if agreed := {name: leaf for name, leaf in whole.items() if name not in differing}:
                state[check] = agreed
    return LeftCheckpoint.of(cell, saved, state)


def leave_to_trainer(cell: Cell, newest: Checkpoint, run: TrainingRun, losses: Losses) -> None:
    """Leave to a fresh process of each rank what the newest checkpoint of a trainer must bring back, and what
    training must come to from there; drop what is cached of the files."""
    if cell.config.verify is not Verify.deep:
        return
    left = [LeftCheckpoint.of(cell, newest, newest.state)]
    handover = Handover.of(left, losses, losses.states, keeps_random=run.keeps_random)
    with cell.phase("verify", "left"):
        leave(cell, handover, NEWEST_OF_RANK.format(cell.world.rank))
        if cell.world.rank == 0:
            newest.checkpointer.drop_cached(newest.checkpoint_id)
