"""FSDP1 flattens parameters in memory order, and a load the state of the optimizer in row-major order
(docs/findings/fsdp1-memory-order.md)."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from dcpbench.cell.cell import Cell
from dcpbench.cell.explained import Restored, Resumed
from dcpbench.core.defects import Defect, Moment
from dcpbench.plugins.defects._cells import fsdp1_of_user
from dcpbench.plugins.defects._loads import exact_with_saved
from dcpbench.plugins.defects._slices import after_load, slices
from dcpbench.verify.compare import Recall
from dcpbench.verify.layout import Extent
from dcpbench.verify.snapshot import Leaves
from dcpbench.workloads.run_state import State

_BY, _CHECK = "taken_by_rows", "optim_equal"


def _expected(cell: Cell, moment: Moment, reference: Restored | Resumed) -> Iterator[State]:
    if isinstance(reference, Resumed):
        yield from exact_with_saved(cell, reference, _CHECK, _BY)
    else:
        yield from after_load(reference, _CHECK, taken_by_rows)


def taken_by_rows(saved: Leaves, actual: Leaves, recall: Recall) -> tuple[Leaves, Leaves]:
    """Return the `slices` of parts that are not in row-major order."""
    return slices(saved, actual, recall, lambda extent: bool(extent.order), _saved_and_loaded)


def _saved_and_loaded(held: torch.Tensor, extent: Extent) -> torch.Tensor:
    """Return the full tensor that is saved of parts that were taken by rows."""
    loaded = torch.empty_like(held)
    replace(extent, start=0, numel=held.numel()).put(loaded, held.reshape(-1))
    return loaded


defect = Defect(("restored", "resumed"), fsdp1_of_user, _expected, from_before=False)
