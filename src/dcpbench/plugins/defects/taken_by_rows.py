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
from dcpbench.plugins.defects.sliced_by_shard import is_what_was
from dcpbench.verify.compare import Recall
from dcpbench.verify.snapshot import Leaves, TensorLeaf
from dcpbench.workloads.run_state import State

_BY, _CHECK = "taken_by_rows", "optim_equal"


def _expected(cell: Cell, moment: Moment, reference: Restored | Resumed) -> Iterator[State]:
    if isinstance(reference, Resumed):
        yield from exact_with_saved(cell, reference, _CHECK, _BY)
        return
    checkpoint, actual = reference.checkpoint, reference.actual.get(_CHECK, {})
    wrong = {name: actual[name] for name in reference.names.get(_CHECK, ()) if name in actual}
    for leaves in taken_by_rows(checkpoint.state.get(_CHECK, {}), wrong, checkpoint.recall_of(_CHECK)):
        yield {_CHECK: leaves}


def taken_by_rows(saved: Leaves, actual: Leaves, recall: Recall) -> tuple[Leaves, Leaves]:
    """Return the parts of a rank as they are once they were loaded, and once these were saved and loaded.

    Args:
        saved: this rank's parts.
        actual: this rank's live parts.
        recall: reads the checkpoint; used if it equals the saved state.
    """
    once, again = Leaves(), Leaves()
    for name, part in actual.items():
        if not isinstance(part, TensorLeaf) or not part.extent.order:
            continue
        held = recall(name)
        if held is None or not is_what_was(saved.get(name), held):
            continue
        loaded, begin = torch.empty_like(held), part.extent.start
        replace(part.extent, start=0, numel=held.numel()).put(loaded, held.reshape(-1))
        for leaves, whole in ((once, held), (again, loaded)):
            own = whole.reshape(-1)[begin : begin + part.extent.numel]
            leaves[name] = replace(part, local=own.reshape(part.local.shape))
    return once, again


defect = Defect(("restored", "resumed"), fsdp1_of_user, _expected, from_before=False)
