"""Loads that give a rank another slice of a full tensor of the optimizer than its part."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from dcpbench.cell.cell import Cell
from dcpbench.cell.known_defects import LoadReference
from dcpbench.compare.leaves import TensorReader
from dcpbench.config.schema import Config
from dcpbench.core.defects import Defect, Moment
from dcpbench.core.state import StatePart
from dcpbench.plugins.defects._cells import fsdp1_sizes
from dcpbench.state.layout import Extent
from dcpbench.state.snapshot import Leaves, State, TensorLeaf, has_content

_PART = StatePart.optimizer

IsSliced = Callable[[Extent], bool]
"""Returns whether a part with this extent is concerned."""
SetAgain = Callable[..., torch.Tensor]
"""Returns the full tensor that consists of the slices: takes the saved one, an extent, and as `shards` the
degree of TP."""


def loads_slices(applies: Callable[[Config], bool], is_sliced: IsSliced, set_again: SetAgain) -> Defect:
    """Return the defect by which a load under FSDP1 gives ranks such slices."""

    def expected(cell: Cell, moment: Moment, reference: LoadReference) -> Iterator[State]:
        checkpoint, actual = reference.checkpoint, reference.actual.get(_PART, {})
        wrong = {name: actual[name] for name in reference.names.get(_PART, ()) if name in actual}
        again = partial(set_again, shards=fsdp1_sizes(cell.config).get("tp", 1))
        saved = checkpoint.state.get(_PART, {})
        read_saved = checkpoint.reader_of(_PART, cell.checkpointer)
        for leaves in slices(saved, wrong, read_saved, is_sliced, again):
            yield {_PART: leaves}

    return Defect(("restored",), applies, expected)


def slices(
    saved: Leaves,
    actual: Leaves,
    read_saved: TensorReader,
    is_sliced: IsSliced,
    set_again: Callable[[torch.Tensor, Extent], torch.Tensor],
) -> tuple[Leaves, Leaves]:
    """Return the parts of a rank as slices of the tensors that were saved, and as they are once these slices
    were set again.

    Args:
        saved: this rank's parts, or the digests of full tensors.
        actual: this rank's live parts.
        read_saved: reads the checkpoint; used if it equals the saved state.
    """
    once, again = Leaves(), Leaves()
    for name, leaf in actual.items():
        if not isinstance(leaf, TensorLeaf) or not is_sliced(leaf.extent):
            continue
        held = read_saved(name)
        if held is None or not has_content(saved.get(name), held):
            continue
        begin = leaf.extent.start
        for leaves, full in ((once, held), (again, set_again(held, leaf.extent))):
            elements = full.reshape(-1)[begin : begin + leaf.extent.numel]
            leaves[name] = replace(leaf, local=elements.reshape(leaf.local.shape))
    return once, again
