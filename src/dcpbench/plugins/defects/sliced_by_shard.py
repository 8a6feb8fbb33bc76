"""FSDP1 + TP: a slice of the full tensor is set, by offsets within a TP shard
(docs/findings/fsdp1-tp-optimizer-state.md)."""

from collections.abc import Iterator
from functools import partial

import torch

from dcpbench.cell.cell import Cell
from dcpbench.cell.explained import Restored, Resumed
from dcpbench.core.defects import Defect, Moment
from dcpbench.plugins.defects._cells import fsdp1_sizes, has_tensor_parallel_fsdp1
from dcpbench.plugins.defects._loads import exact_with_saved
from dcpbench.plugins.defects._slices import after_load, slices
from dcpbench.verify.compare import Recall
from dcpbench.verify.layout import Extent
from dcpbench.verify.snapshot import Leaves
from dcpbench.workloads.run_state import State

_BY, _CHECK = "sliced_by_shard", "optim_equal"


def _expected(cell: Cell, moment: Moment, reference: Restored | Resumed) -> Iterator[State]:
    if isinstance(reference, Resumed):
        if cell.config.workload.target:
            yield from exact_with_saved(cell, reference, _CHECK, _BY)
        return
    shards = fsdp1_sizes(cell.config)["tp"]
    yield from after_load(reference, _CHECK, partial(sliced, shards=shards))


def sliced(saved: Leaves, actual: Leaves, recall: Recall, shards: int) -> tuple[Leaves, Leaves]:
    """Return the `slices` of parts that are sharded by TP too; `shards` is the degree of that."""
    set_again = partial(_set_again, shards=shards)
    return slices(saved, actual, recall, lambda extent: extent.box != extent.shape, set_again)


def _set_again(held: torch.Tensor, extent: Extent, shards: int) -> torch.Tensor:
    """Return the full tensor that consists of the slices: the restored state was set again."""
    cut = next(
        one for one, (box, size) in enumerate(zip(extent.box, extent.shape, strict=True)) if box != size
    )
    again = held.clone()
    for shard in again.chunk(shards, cut):
        shard.copy_(held.reshape(-1)[: shard.numel()].reshape(shard.shape))
    return again


defect = Defect(("restored", "resumed"), has_tensor_parallel_fsdp1, _expected)
