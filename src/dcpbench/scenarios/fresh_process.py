"""What `verify=deep` adds to a scenario: a process that had no part in saving loads its newest
checkpoint, once what the kernel had cached of the files is dropped."""

import io
from pathlib import Path
from typing import Any

import torch

from dcpbench.config.groups import Verify
from dcpbench.scenarios import checks, steps
from dcpbench.scenarios.cell import Cell
from dcpbench.scenarios.checkpoint import FLAGS, Checkpoint, key_of
from dcpbench.verify.compare_layouts import digests
from dcpbench.verify.files import drop_pages
from dcpbench.verify.layout import Extent
from dcpbench.verify.perturb import all_different, controllable
from dcpbench.verify.plain_read import compare_stored
from dcpbench.verify.snapshot import DigestedLeaf, Leaves, retained, snapshot_nested

_LEFT = "newest.pt"


def leave(cell: Cell) -> None:
    """At the end of a stage, leave to the fresh process what its newest complete checkpoint must bring back,
    as digests of whole tensors and small exact values, and drop what is cached of the files; collective.
    What the ranks do not agree on no one checkpoint brings back: what they load shows that."""
    if cell.config.verify is not Verify.deep or not cell.complete:
        return
    (newest,) = cell.complete
    state = {}
    with cell.phase("verify", "left"):
        for check, leaves in newest.state.items():
            stored = {name: leaf for name, leaf in leaves.items() if key_of(check, name) in newest.keys}
            if check != FLAGS:
                whole, wrong = digests(stored, cell.world.checkpoint_group)
                differing = {finding.name for finding in wrong}
                if agreed := {name: leaf for name, leaf in whole.items() if name not in differing}:
                    state[check] = agreed
        if cell.world.rank == 0:
            torch.save((newest.step, newest.checkpoint_id, state), cell.folder / _LEFT)
            drop_pages(Path(newest.checkpoint_id))


def load_alone(cell: Cell, **_: Any) -> None:
    """The last stage: everything that the newest checkpoint holds is loaded by its keys, whole, on one rank
    without a process group. It must be what was saved, and what a reader finds that is not the
    checkpointer's. Where no save came to its end there is nothing to load."""
    if not (cell.folder / _LEFT).exists():
        return
    with torch.serialization.safe_globals([DigestedLeaf, Extent]):
        step, checkpoint_id, state = torch.load(cell.folder / _LEFT, weights_only=True)
    checkpointer = steps.open_checkpointer(cell)
    saved = Checkpoint(step, checkpoint_id, checkpointer, state, by_content=True)
    where = f"{saved}, loaded by a fresh process"
    with cell.phase("verify", "fresh_process"):
        loaded: dict[str, Any] = {
            key: None if entry.shape is None else torch.empty(entry.shape, dtype=_dtype(entry.dtype))
            for key, entry in checkpointer.manifest(checkpoint_id).entries.items()
        }
        checkpointer.load(loaded, checkpoint_id)
        held = retained(snapshot_nested(loaded))
        for check, leaves in state.items():
            actual: Leaves = {}
            for name, leaf in leaves.items():
                key = key_of(check, name)
                if key in loaded:
                    is_tensor, value = isinstance(leaf, DigestedLeaf), loaded[key]
                    actual |= {name: held.get(key)} if is_tensor else snapshot_nested({name: _as_seen(value)})
            found, control = (saved.compare(check, each, None) for each in (actual, all_different(actual)))
            checks.verify(cell, check, found, control, controllable(leaves), where)
        if stored := checkpointer.stored(checkpoint_id):
            seen = compare_stored([held], stored, 0, 1, cell.world.device)
            cell.check("files_equal", seen.found, where, seen.control)
            cell.control("files_equal", seen.control, where)


def _as_seen(value: Any) -> Any:
    """A loaded value that was no tensor, as a comparison looks at it: numbers for tensors without dimensions,
    and what was written for a stream of bytes."""
    if isinstance(value, torch.Tensor) and value.dim():
        value = io.BytesIO(value.numpy().tobytes())
    if isinstance(value, io.BytesIO):
        value.seek(0)
        return torch.load(value, weights_only=True)
    return value.item() if isinstance(value, torch.Tensor) else value


def _dtype(name: str | None) -> torch.dtype:
    dtype = getattr(torch, str(name).removeprefix("torch."))
    assert isinstance(dtype, torch.dtype)
    return dtype
