"""What `verify=deep` adds to a scenario: a process that had no part in saving loads its newest
checkpoint, once what the kernel had cached of the files is dropped. A trainer of a user's own loads it
itself, in as many processes as have saved it."""

from typing import Any

import torch

from dcpbench.cell import checks, steps
from dcpbench.cell.cell import Cell
from dcpbench.cell.handover import NEWEST, NEWEST_OF_RANK, take
from dcpbench.cell.read_whole import verify_read
from dcpbench.checkpointers.base import Checkpointer
from dcpbench.verify.plain_read import compare_stored

_HOW = ", loaded by a fresh process"


def load_by_trainer(cell: Cell) -> None:
    """The last stage of a trainer: built anew in processes that saved nothing, it loads the newest checkpoint
    and goes on from there. What that takes is no cost of its way to save and load."""
    before = len(cell.report.measurements)
    left = take(cell, NEWEST_OF_RANK.format(cell.world.rank), any_values=True)
    saved = left.checkpoints[0].checkpoint(cell, steps.open_checkpointer(cell), how=_HOW)
    target = steps.build_anew(cell)
    target.keeps_random = left.keeps_random
    checks.load_and_verify(cell, target, saved)
    checks.resume(cell, target, saved, left.losses(cell))
    own = [one for one in cell.report.measurements if (one.phase or "").startswith("verify")]
    cell.report.measurements[before:] = own


def load_alone(cell: Cell, **_: Any) -> None:
    """The last stage: everything that the newest checkpoint holds is loaded by its keys, whole, on one rank
    without a process group. It must be what was saved, and what a reader finds that is not the
    checkpointer's. Where no save came to its end there is nothing to load."""
    if not (cell.folder / NEWEST).exists():
        return
    checkpointer = steps.open_checkpointer(cell)
    left = take(cell, NEWEST).checkpoints[0]
    saved = left.checkpoint(cell, checkpointer, by_content=True, how=_HOW)
    with cell.phase("verify", "fresh_process"):
        loaded = empty_values(checkpointer, saved.checkpoint_id)
        checkpointer.load(loaded, saved.checkpoint_id)
        held = verify_read(cell, saved, loaded, None)
        if in_files := checkpointer.stored(saved.checkpoint_id):
            compared = compare_stored([held], in_files, 0, 1, cell.world.device)
            cell.record("files_equal", compared, str(saved))


def empty_values(checkpointer: Checkpointer, checkpoint_id: str) -> dict[str, Any]:
    """What a load of everything that a checkpoint holds fills, by the flattened keys."""
    return {
        key: None if entry.shape is None else torch.empty(entry.shape, dtype=_dtype(entry.dtype))
        for key, entry in checkpointer.manifest(checkpoint_id).entries.items()
    }


def _dtype(name: str | None) -> torch.dtype:
    dtype = getattr(torch, str(name).removeprefix("torch."))
    assert isinstance(dtype, torch.dtype)
    return dtype
