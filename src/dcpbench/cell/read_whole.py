"""A checkpoint that was read whole, by its keys, into plain values: against what was saved."""

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from dcpbench.cell.cell import Cell
from dcpbench.cell.checkpoint import Checkpoint
from dcpbench.verify.plain_read import WholeValues
from dcpbench.verify.snapshot import Leaves
from dcpbench.workloads.run_state import key_of


def verify_read(
    cell: Cell, saved: Checkpoint, values: Mapping[str, Any], group: dist.ProcessGroup | None
) -> Leaves:
    """Values by their flattened keys, tensors whole, must be by content what was saved; collective over
    `group`. Returns the values as leaves."""
    read = WholeValues(values)
    for check, leaves in saved.state.items():
        keys = {name: key_of(check, name, saved.numbers) for name in leaves}
        compared = saved.compared(check, read.like(leaves, keys), group, saved.recall_of(check))
        cell.record(check, compared, str(saved))
    return read.leaves
