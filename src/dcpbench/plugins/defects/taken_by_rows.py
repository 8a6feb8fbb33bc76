"""FSDP1 flattens parameters in memory order, and a load the state of the optimizer in row-major order
(docs/findings/fsdp1-memory-order.md)."""

from dataclasses import replace

import torch

from dcpbench.plugins.defects._cells import fsdp1_of_user
from dcpbench.plugins.defects._slices import loads_slices
from dcpbench.state.layout import Extent


def _is_reordered(extent: Extent) -> bool:
    return bool(extent.order)


def _saved_and_loaded(held: torch.Tensor, extent: Extent, shards: int) -> torch.Tensor:
    """Return the full tensor that is saved of parts that were taken by rows."""
    loaded = torch.empty_like(held)
    replace(extent, start=0, numel=held.numel()).put(loaded, held.reshape(-1))
    return loaded


defect = loads_slices(fsdp1_of_user, _is_reordered, _saved_and_loaded)
