"""What a stage leaves for the next one, which has other processes and maybe another layout."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from dcpbench.checkpointers.base import Checkpointer
from dcpbench.scenarios.cell import Cell
from dcpbench.scenarios.checkpoint import RANDOM, Checkpoint, State
from dcpbench.scenarios.steps import Losses
from dcpbench.verify.compare_layouts import digests
from dcpbench.verify.layout import Extent
from dcpbench.verify.snapshot import DigestedLeaf
from dcpbench.workloads.batches import batches_of

_HANDOVER = "handover.pt"


def hand_over(cell: Cell, checkpoints: Sequence[Checkpoint], losses: Losses) -> None:
    """Leave a file beside the checkpoints: the digests of whole tensors and the exact small values that they
    must bring back, and those that training on from there must come to; collective. Ranks that do not agree
    on what was saved are found here."""

    def whole(state: State, where: str | None = None) -> State:
        added: State = {}
        for check, leaves in state.items():
            added[check], wrong = digests(leaves, cell.world.group)
            if wrong and where:
                told = {finding.name: True for finding in wrong}
                cell.check(check, wrong, where, told)
                cell.control(check, told, where)  # what is told was not missed
        return added

    with cell.phase("verify", "handover"):
        left = [
            (
                one.step,
                Path(one.checkpoint_id).name,
                whole(one.state, str(one)),
                cell.files.get(one.checkpoint_id, ())[:2],
                one.numbers,
            )
            for one in checkpoints
        ]
        states = {step: whole(state) for step, state in losses.states.items()}
    if cell.world.rank == 0:
        about = losses.why_layout_bound, [*losses.computes_in], losses.torch_version
        torch.save((left, losses.continued, states, *about), cell.folder / _HANDOVER)


def take_over(cell: Cell, checkpointer: Checkpointer, same_layout: bool) -> tuple[list[Checkpoint], Losses]:
    """The checkpoints of the stage before, the oldest first, and the losses to go on with; without the state
    of its ranks' random generators if this one does not have the same layout."""
    with torch.serialization.safe_globals([DigestedLeaf, Extent]):
        loaded = torch.load(cell.folder / _HANDOVER, weights_only=True)
    left, continued, states, why_layout_bound, computes_in, version = loaded
    for _, name, _, files, _ in left:
        if files:
            checkpoint_id = str(cell.folder / name)
            cell.files[checkpoint_id] = *files, partial(checkpointer.digests, checkpoint_id)
    for state in () if same_layout else [*states.values(), *(one[2] for one in left)]:
        del state[RANDOM]
    checkpoints = [
        Checkpoint(step, str(cell.folder / name), checkpointer, state, by_content=True, numbers=numbers)
        for step, name, state, _, numbers in left
    ]
    data = batches_of(cell.config, cell.world.device)
    about = why_layout_bound, frozenset(computes_in), version
    return checkpoints, Losses(continued, data, states, {}, *about)
