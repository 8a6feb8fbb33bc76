"""FSDP1 + TP: a slice of the full tensor is set, by offsets within a TP shard
(docs/findings/fsdp1-tp-optimizer-state.md)."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from dcpbench.cell.cell import Cell
from dcpbench.cell.explained import Restored, Resumed
from dcpbench.core.defects import Defect, Moment
from dcpbench.plugins.defects._cells import fsdp1_sizes, has_tensor_parallel_fsdp1
from dcpbench.plugins.defects._loads import exact_with_saved
from dcpbench.verify.compare import Recall
from dcpbench.verify.layout import Extent
from dcpbench.verify.snapshot import Leaf, Leaves, TensorLeaf, digest_of
from dcpbench.workloads.run_state import State

_BY, _CHECK = "sliced_by_shard", "optim_equal"


def _expected(cell: Cell, moment: Moment, reference: Restored | Resumed) -> Iterator[State]:
    if isinstance(reference, Resumed):
        if cell.config.workload.target:
            yield from exact_with_saved(cell, reference, _CHECK, _BY)
        return
    checkpoint, actual = reference.checkpoint, reference.actual.get(_CHECK, {})
    wrong = {name: actual[name] for name in reference.names.get(_CHECK, ()) if name in actual}
    shards = fsdp1_sizes(cell.config)["tp"]
    for leaves in sliced(checkpoint.state.get(_CHECK, {}), wrong, checkpoint.recall_of(_CHECK), shards):
        yield {_CHECK: leaves}


def sliced(saved: Leaves, actual: Leaves, recall: Recall, shards: int) -> tuple[Leaves, Leaves]:
    """Return the parts of a rank as slices of the tensors that were saved, and as they are once these slices
    were set again.

    Args:
        saved: this rank's parts, or the digests of full tensors.
        actual: this rank's live parts.
        recall: reads the checkpoint; used if it equals the saved state.
        shards: the degree of the tensor parallelism.
    """
    once, again = Leaves(), Leaves()
    for name, part in actual.items():
        if not isinstance(part, TensorLeaf) or part.extent.box == part.extent.shape:
            continue
        held = recall(name)
        if held is None or not is_what_was(saved.get(name), held):
            continue
        for leaves, whole in ((once, held), (again, _set_again(held, part.extent, shards))):
            begin = part.extent.start
            own = whole.reshape(-1)[begin : begin + part.extent.numel]
            leaves[name] = replace(part, local=own.reshape(part.local.shape))
    return once, again


def is_what_was(saved: Leaf, held: torch.Tensor) -> bool:
    """Return whether a full tensor has the saved values at the place of a saved part."""
    if saved is None or (tuple(held.shape), held.dtype) != (saved.extent.shape, saved.dtype):
        return False
    return digest_of(TensorLeaf(saved.extent.take(held), saved.extent, None)) == digest_of(saved)


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
