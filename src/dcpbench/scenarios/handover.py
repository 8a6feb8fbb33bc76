"""Leave a file to the processes of the next stage, which may have another layout, in the folder of the
cell."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dcpbench.checkpointers.base import Checkpointer
from dcpbench.core.rank_report import Compared
from dcpbench.scenarios.cell import Cell
from dcpbench.scenarios.checkpoint import RANDOM, Checkpoint
from dcpbench.scenarios.steps import Losses
from dcpbench.verify.compare_layouts import digests
from dcpbench.verify.files import FileDigests
from dcpbench.verify.layout import Extent
from dcpbench.verify.snapshot import DigestedLeaf, State
from dcpbench.workloads.batches import batches_of

_NEXT_STAGE = "handover.pt"


@dataclass(frozen=True)
class LeftCheckpoint:
    """A checkpoint that is left to other processes: in which folder of the cell's it is, what it must bring
    back, the numbers of parameters in it, and what it was called and its files were when it was complete."""

    step: int
    folder: str
    state: State
    numbers: Mapping[str, str] = field(default_factory=dict)
    files: tuple[str, FileDigests] | None = None

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
    safe: list[Any] = [Handover, LeftCheckpoint, DigestedLeaf, Extent]
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
