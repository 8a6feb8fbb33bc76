"""The last stage with `verify=deep`: processes that did not save load the newest checkpoint, after the page
cache of its files was dropped. A user's trainer loads it itself, on as many ranks as have saved it."""

from typing import Any

import torch

from dcpbench.cell import checkpoint_files, checks, steps
from dcpbench.cell.cell import Cell
from dcpbench.cell.handover import NEWEST, NEWEST_OF_RANK, take
from dcpbench.checkpointers.base import Checkpointer
from dcpbench.verify.plain_read import compare_stored

_HOW = ", loaded by a fresh process"


def load_by_trainer(cell: Cell) -> None:
    """Build a user's trainer, load the newest checkpoint, and train on. Costs are not measured here."""
    before = len(cell.report.measurements)
    left = take(cell, NEWEST_OF_RANK.format(cell.world.rank))
    saved = left.checkpoints[0].checkpoint(cell, steps.open_checkpointer(cell), how=_HOW)
    if not checkpoint_files.remaining(cell, [saved]):
        return
    target = steps.build_target(cell)
    target.random.kept, target.judged = left.keeps_random, left.record.judged
    checks.load_and_verify(cell, target, saved)
    checks.resume(cell, target, saved, left.record)
    own = [one for one in cell.report.measurements if (one.phase or "").startswith("verify")]
    cell.report.measurements[before:] = own


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
            compared = compare_stored([held], in_files, 0, 1, cell.world.device)
            cell.record("files_equal", compared, str(saved), ("loaded {}", "{} in the files"))


def empty_values(checkpointer: Checkpointer, checkpoint_id: str) -> dict[str, Any]:
    """Return a state dict, by flattened keys, that a load of everything in a checkpoint fills."""
    return {
        key: None
        if entry.shape is None
        else torch.empty(entry.shape, dtype=getattr(torch, str(entry.dtype).removeprefix("torch.")))
        for key, entry in checkpointer.manifest(checkpoint_id).entries.items()
    }
