"""What `verify=deep` adds to a scenario: a process that had no part in saving loads its newest
checkpoint, once what the kernel had cached of the files is dropped. A trainer of a user's own loads it
itself, in as many processes as have saved it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from dcpbench.checkpointers.base import Checkpointer
from dcpbench.config.groups import Verify
from dcpbench.scenarios import checks, steps
from dcpbench.scenarios.cell import Cell
from dcpbench.scenarios.checkpoint import Checkpoint, SavedCheckpoint, State, as_saved, key_of
from dcpbench.scenarios.read_whole import verify_read
from dcpbench.scenarios.steps import Losses
from dcpbench.verify.compare_layouts import digests
from dcpbench.verify.files import drop_pages
from dcpbench.verify.layout import Extent
from dcpbench.verify.plain_read import compare_stored
from dcpbench.verify.snapshot import DigestedLeaf
from dcpbench.workloads.batches import batches_of
from dcpbench.workloads.training_run import TrainingRun

_LEFT, _LEFT_BY = "newest.pt", "newest-rank{}.pt"
_HOW = ", loaded by a fresh process"

SAFE: list[Any] = [DigestedLeaf, Extent]
"""What a state that is left to another process is made of."""


def leave(cell: Cell) -> None:
    """At the end of a stage, leave to the fresh process what its newest complete checkpoint must bring back,
    as digests of whole tensors and small exact values, and drop what is cached of the files; collective.
    What the ranks do not agree on no one checkpoint brings back: what they load shows that."""
    if cell.config.verify is not Verify.deep or cell.config.own_trainer or not cell.complete:
        return
    (newest,) = cell.complete
    state, numbers = stored_state(cell, newest)
    with cell.phase("verify", "left"):
        if cell.world.rank == 0:
            torch.save((newest.step, newest.checkpoint_id, state, numbers), cell.folder / _LEFT)
            drop_pages(Path(newest.checkpoint_id))


def stored_state(cell: Cell, saved: SavedCheckpoint) -> tuple[State, Mapping[str, str]]:
    """What a checkpoint must bring back to a process that had no part in saving it, as digests of whole
    tensors and small exact values, without what the ranks do not agree on; collective. And the numbers of
    parameters by FQN, where it has an optimizer's state under these."""
    state: State = {}
    with cell.phase("verify", "left"):
        for check, leaves in as_saved(saved.source, saved.state).items():
            names = (name for name in leaves if key_of(check, name, saved.numbers) in saved.keys)
            stored = {name: leaves[name] for name in names}
            whole, wrong = digests(stored, cell.world.group)
            differing = {finding.name for finding in wrong}
            if agreed := {name: leaf for name, leaf in whole.items() if name not in differing}:
                state[check] = agreed
    return state, saved.numbers


def leave_to_trainer(cell: Cell, newest: Checkpoint, run: TrainingRun, losses: Losses) -> None:
    """Leave to a fresh process of each rank what the newest checkpoint of a trainer must bring back, and what
    training must come to from there; drop what is cached of the files."""
    if cell.config.verify is not Verify.deep:
        return
    left = newest.step, newest.checkpoint_id, newest.state, run.keeps_random, losses.continued, losses.states
    with cell.phase("verify", "left"):
        torch.save(left, cell.folder / _LEFT_BY.format(cell.world.rank))
        if cell.world.rank == 0:
            drop_pages(Path(newest.checkpoint_id))


def load_by_trainer(cell: Cell) -> None:
    """The last stage of a trainer: built anew in processes that saved nothing, it loads the newest checkpoint
    and goes on from there. What that takes is no cost of its way to save and load."""
    before = len(cell.report.measurements)
    # Any values may be among a trainer's; this cell wrote the file.
    left = torch.load(cell.folder / _LEFT_BY.format(cell.world.rank), weights_only=False)
    step, checkpoint_id, state, keeps_random, continued, states = left
    saved = Checkpoint(step, checkpoint_id, steps.open_checkpointer(cell), state, how=_HOW)
    target = steps.build_anew(cell)
    target.keeps_random = keeps_random
    checks.load_and_verify(cell, target, saved)
    data = batches_of(cell.config, cell.world.device)
    checks.resume(cell, target, saved, Losses(continued, data, states))
    own = [one for one in cell.report.measurements if (one.phase or "").startswith("verify")]
    cell.report.measurements[before:] = own


def load_alone(cell: Cell, **_: Any) -> None:
    """The last stage: everything that the newest checkpoint holds is loaded by its keys, whole, on one rank
    without a process group. It must be what was saved, and what a reader finds that is not the
    checkpointer's. Where no save came to its end there is nothing to load."""
    if not (cell.folder / _LEFT).exists():
        return
    with torch.serialization.safe_globals(SAFE):
        step, checkpoint_id, state, numbers = torch.load(cell.folder / _LEFT, weights_only=True)
    checkpointer = steps.open_checkpointer(cell)
    saved = Checkpoint(step, checkpoint_id, checkpointer, state, by_content=True, how=_HOW, numbers=numbers)
    where = str(saved)
    with cell.phase("verify", "fresh_process"):
        loaded = empty_values(checkpointer, checkpoint_id)
        checkpointer.load(loaded, checkpoint_id)
        held = verify_read(cell, saved, loaded, None)
        if stored := checkpointer.stored(checkpoint_id):
            seen = compare_stored([held], stored, 0, 1, cell.world.device)
            cell.check("files_equal", seen.found, where, seen.control)
            cell.control("files_equal", seen.control, where)


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
