"""Loads that give a rank another slice of a full tensor than its part."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from dcpbench.cell.explained import Restored
from dcpbench.verify.compare import Recall
from dcpbench.verify.layout import Extent
from dcpbench.verify.snapshot import Leaf, Leaves, TensorLeaf, digest_of
from dcpbench.workloads.run_state import State


def after_load(
    reference: Restored, check: str, slices_of: Callable[[Leaves, Leaves, Recall], tuple[Leaves, Leaves]]
) -> Iterator[State]:
    """Yield the wrong leaves of a check as `slices_of`, which `slices` makes of them."""
    checkpoint, actual = reference.checkpoint, reference.actual.get(check, {})
    wrong = {name: actual[name] for name in reference.names.get(check, ()) if name in actual}
    for leaves in slices_of(checkpoint.state.get(check, {}), wrong, checkpoint.recall_of(check)):
        yield {check: leaves}


def slices(
    saved: Leaves,
    actual: Leaves,
    recall: Recall,
    is_sliced: Callable[[Extent], bool],
    set_again: Callable[[torch.Tensor, Extent], torch.Tensor],
) -> tuple[Leaves, Leaves]:
    """Return the parts of a rank as slices of the tensors that were saved, and as they are once these slices
    were set again.

    Args:
        saved: this rank's parts, or the digests of full tensors.
        actual: this rank's live parts; those with an extent that `is_sliced` are concerned.
        recall: reads the checkpoint; used if it equals the saved state.
        set_again: returns the full tensor that consists of the slices, given the saved one.
    """
    once, again = Leaves(), Leaves()
    for name, part in actual.items():
        if not isinstance(part, TensorLeaf) or not is_sliced(part.extent):
            continue
        held = recall(name)
        if held is None or not _is_what_was(saved.get(name), held):
            continue
        begin = part.extent.start
        for leaves, full in ((once, held), (again, set_again(held, part.extent))):
            own = full.reshape(-1)[begin : begin + part.extent.numel]
            leaves[name] = replace(part, local=own.reshape(part.local.shape))
    return once, again


def _is_what_was(saved: Leaf, held: torch.Tensor) -> bool:
    """Return whether a full tensor has the saved values at the place of a saved part."""
    if saved is None or (tuple(held.shape), held.dtype) != (saved.extent.shape, saved.dtype):
        return False
    return digest_of(TensorLeaf(saved.extent.take(held), saved.extent, None)) == digest_of(saved)
