"""FSDP1 + TP: a slice of the full tensor is set, by offsets within a TP shard
(docs/findings/fsdp1-tp-optimizer-state.md)."""

import torch

from dcpbench.plugins.defects._cells import has_tensor_parallel_fsdp1
from dcpbench.plugins.defects._slices import loads_slices
from dcpbench.state.layout import Extent


def is_cut(extent: Extent) -> bool:
    """Return whether TP shards the tensor too."""
    return extent.box != extent.shape


def set_again(held: torch.Tensor, extent: Extent, shards: int) -> torch.Tensor:
    """Return the full tensor that consists of the slices: the restored state was set again."""
    cut = next(
        dimension
        for dimension, (box, size) in enumerate(zip(extent.box, extent.shape, strict=True))
        if box != size
    )
    again = held.clone()
    for shard in again.chunk(shards, cut):
        shard.copy_(held.reshape(-1)[: shard.numel()].reshape(shard.shape))
    return again


defect = loads_slices(has_tensor_parallel_fsdp1, is_cut, set_again)
