"""What `verify=deep` adds to a scenario: a process that had no part in saving loads its newest
checkpoint, once what the kernel had cached of the files is dropped. A trainer of a user's own loads it
itself, in as many processes as have saved it."""

from pathlib import Path
from typing import Any

import torch

from dcpbench.checkpointers.base import Checkpointer
from dcpbench.config.groups import Verify
from dcpbench.scenarios import checks, steps
from dcpbench.scenarios.cell import Cell
from dcpbench.scenarios.checkpoint import Checkpoint, SavedCheckpoint, as_saved, key_of
from dcpbench.scenarios.handover import Handover, LeftCheckpoint, leave, take
from dcpbench.scenarios.read_whole import verify_read
from dcpbench.scenarios.steps import Losses
from dcpbench.verify.compare_layouts import digests
from dcpbench.verify.files import drop_pages
from dcpbench.verify.plain_read import compare_stored
from dcpbench.verify.snapshot import State
from dcpbench.workloads.training_run import TrainingRun

_LEFT, _LEFT_BY = "newest.pt", "newest-rank{}.pt"
_HOW = ", loaded by a fresh process"


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
            leave(cell, Handover([left]), _LEFT)
            drop_pages(Path(newest.checkpoint_id))


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
        leave(cell, handover, _LEFT_BY.format(cell.world.rank))
        if cell.world.rank == 0:
            drop_pages(Path(newest.checkpoint_id))


def load_by_trainer(cell: Cell) -> None:
    """The last stage of a trainer: built anew in processes that saved nothing, it loads the newest checkpoint
    and goes on from there. What that takes is no cost of its way to save and load."""
    before = len(cell.report.measurements)
    left = take(cell, _LEFT_BY.format(cell.world.rank), any_values=True)
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
    if not (cell.folder / _LEFT).exists():
        return
    checkpointer = steps.open_checkpointer(cell)
    left = take(cell, _LEFT).checkpoints[0]
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
