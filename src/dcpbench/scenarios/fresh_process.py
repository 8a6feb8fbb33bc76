"""The last stage with `verify=deep`: processes that did not save load the newest checkpoint, after the page
cache of its files was dropped."""

from typing import Any

import torch

from dcpbench.cell import checks, steps
from dcpbench.cell.cell import Cell
from dcpbench.cell.handover import NEWEST, take
from dcpbench.checkpointers.base import Checkpointer
from dcpbench.verify.plain_read import compare_stored

_HOW = ", loaded by a fresh process"


def load_alone(cell: Cell, **_: Any) -> None:
    """Load everything in the newest checkpoint by its keys, full tensors, on one rank without a process
    group. It has to equal the saved state, and what another reader reads. Without a complete save
    there is nothing to load."""
    if not (cell.folder / NEWEST).exists():
        return
    checkpointer = steps.open_checkpointer(cell)
    left = take(cell, NEWEST).checkpoints[0]
    saved = left.checkpoint(cell, checkpointer, by_content=True, how=_HOW)
    cell.files.clear()  # their digests were compared in the stage that saved
    with cell.phase("verify", "fresh_process"):
        loaded = empty_values(checkpointer, saved.checkpoint_id)
        checkpointer.load(loaded, saved.checkpoint_id)
        held = checks.verify_values(cell, saved, loaded, None)
        if in_files := checkpointer.stored(saved.checkpoint_id):
            compared = compare_stored([held], in_files, cell.world.device)
            cell.record("files_equal", compared, str(saved), ("loaded {}", "{} in the files"))


def empty_values(checkpointer: Checkpointer, checkpoint_id: str) -> dict[str, Any]:
    """Return a state dict, by flattened keys, that a load of everything in a checkpoint fills."""
    return {
        key: None
        if entry.shape is None
        else torch.empty(entry.shape, dtype=getattr(torch, str(entry.dtype).removeprefix("torch.")))
        for key, entry in checkpointer.manifest(checkpoint_id).entries.items()
    }
