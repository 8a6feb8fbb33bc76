"""What one stage leaves on disk for the next, which has other processes and maybe another layout: of each
checkpoint the digests of whole tensors and the exact small values that it must bring back."""

from pathlib import Path
from typing import Any

import torch

from dcpbench.checkpointers.base import Checkpointer
from dcpbench.scenarios.cell import Cell
from dcpbench.scenarios.checkpoint import Checkpoint, SavedCheckpoint
from dcpbench.scenarios.oracles import Losses
from dcpbench.verify.compare_layouts import WholeDigest, digests
from dcpbench.verify.snapshot import Leaves
from dcpbench.workloads.training_run import batches

_FOLDER = "handover"


def hand_over(cell: Cell, checkpoints: list[SavedCheckpoint], losses: Losses) -> None:
    """Write a file for each checkpoint, beside them; collective. Ranks that do not agree on what was saved
    are found here."""
    folder = cell.folder / _FOLDER
    for checkpoint in checkpoints:
        state: dict[str, Any] = {}
        with cell.phase("verify", "handover"):
            for check, leaves in checkpoint.state.items():
                whole, wrong = digests(leaves, cell.world.checkpoint_group)
                if wrong:
                    cell.check(check, wrong, str(checkpoint))
                state[check] = _plain(whole)
        if cell.world.rank == 0:
            folder.mkdir(exist_ok=True)
            name = Path(checkpoint.checkpoint_id).name
            plain = {"step": checkpoint.step, "name": name, "state": state}
            torch.save({**plain, "continued": losses.continued, "twin": losses.twin}, folder / f"{name}.pt")


def take_over(cell: Cell, checkpointer: Checkpointer) -> tuple[list[Checkpoint], Losses]:
    """The checkpoints of the stage before, the oldest first, and the losses to go on with."""
    paths = sorted((cell.folder / _FOLDER).iterdir())
    read = [torch.load(path, weights_only=True) for path in paths]
    checkpoints = [
        Checkpoint(
            one["step"],
            str(cell.folder / one["name"]),
            checkpointer,
            {check: _leaves(plain) for check, plain in one["state"].items()},
            by_content=True,
        )
        for one in read
    ]
    data = batches(cell.config, cell.world.device)
    return checkpoints, Losses(read[-1]["continued"], read[-1]["twin"], data)


def _plain(leaves: Leaves) -> dict[str, Any]:
    tensors = {name: leaf for name, leaf in leaves.items() if isinstance(leaf, WholeDigest)}
    return {
        "tensors": {name: (one.shape, one.dtype, one.digest, one.kind) for name, one in tensors.items()},
        "values": {name: leaf for name, leaf in leaves.items() if name not in tensors},
    }


def _leaves(plain: dict[str, Any]) -> Leaves:
    tensors = {name: WholeDigest(*fields) for name, fields in plain["tensors"].items()}
    return {**tensors, **plain["values"]}
