"""A checkpoint that was read whole, by its keys, into plain values: against what was saved."""

import io
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from dcpbench.cell.cell import Cell
from dcpbench.cell.checkpoint import Checkpoint, key_of
from dcpbench.verify.perturb import all_different
from dcpbench.verify.snapshot import DigestedLeaf, Idle, Leaves, TensorLeaf, retained, snapshot_nested


def verify_read(
    cell: Cell, saved: Checkpoint, values: Mapping[str, Any], group: dist.ProcessGroup | None
) -> Leaves:
    """Values by their flattened keys, tensors whole, must be by content what was saved; collective over
    `group`. Returns the values as leaves."""
    held = retained(snapshot_nested(dict(values)))
    for check, leaves in saved.state.items():
        actual: Leaves = {}
        for name, leaf in leaves.items():
            key = key_of(check, name, saved.numbers)
            if key not in values or isinstance(leaf, Idle):
                continue
            is_tensor = isinstance(leaf, TensorLeaf | DigestedLeaf)
            actual |= {name: held.get(key)} if is_tensor else snapshot_nested({name: _as_seen(values[key])})
        other = all_different(actual)
        compared = saved.compared(check, actual, other, group, saved.recall_of(check))
        cell.record(check, compared, str(saved))
    return held


def _as_seen(value: Any) -> Any:
    """A value that was no tensor, as a comparison looks at it: numbers for tensors without dimensions, and
    what was written for a stream of bytes."""
    if isinstance(value, torch.Tensor) and value.dim():
        value = io.BytesIO(value.numpy().tobytes())
    if isinstance(value, io.BytesIO):
        value.seek(0)
        return torch.load(value, weights_only=True)
    return value.item() if isinstance(value, torch.Tensor) else value
