"""Buffers differ by rank; a checkpoint contains each from some rank
(docs/findings/buffers-of-some-rank.md)."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from dcpbench.cell.cell import Cell
from dcpbench.cell.known_defects import LoadReference
from dcpbench.core.defects import Defect, Moment
from dcpbench.core.state import Name, StatePart
from dcpbench.plugins.defects._cells import loads_by_dcp
from dcpbench.state.snapshot import DigestedLeaf, Leaves, State, TensorLeaf, digested, of_kind


def _expected(cell: Cell, moment: Moment, reference: LoadReference) -> Iterator[State]:
    checkpoint, restored = reference.checkpoint, moment == "restored"
    saved: Mapping[StatePart, Any] = checkpoint.state if restored else checkpoint.by_key
    for part, wrong in reference.names.items():
        buffers = _buffers_of(saved.get(part, {}))
        yield from _of_each_rank(cell, part, digested(buffers) if restored else buffers, wrong)
        yield from _of_ranks_that_saved(part, buffers)


def _buffers_of(leaves: Leaves) -> Leaves:
    """Return the buffers of a snapshot, on the CPU, to send them to other ranks."""
    return {
        name: replace(leaf, local=leaf.local.cpu()) if isinstance(leaf, TensorLeaf) else leaf
        for name, leaf in of_kind("buffer", leaves).items()
    }


def _of_each_rank(cell: Cell, part: StatePart, buffers: Leaves, wrong: Collection[Name]) -> Iterator[State]:
    """Yield the buffers of each rank, of those that are wrong on any rank; collective."""
    names = {name for theirs in cell.world.gathered(wrong) for name in theirs}
    buffers_here = {name: leaf for name, leaf in buffers.items() if name in names}
    yield from cell.world.gathered({part: buffers_here})


def _differing(leaves: Leaves) -> dict[Name, DigestedLeaf]:
    """Return the leaves of an earlier stage that differed by rank."""
    return {name: leaf for name, leaf in leaves.items() if isinstance(leaf, DigestedLeaf) and leaf.of_ranks}


def _of_ranks_that_saved(part: StatePart, buffers: Leaves) -> Iterator[State]:
    """Yield the buffers of each rank of an earlier stage."""
    differing = _differing(buffers)
    for rank in range(max((len(leaf.of_ranks) for leaf in differing.values()), default=0)):
        here = {name: leaf for name, leaf in differing.items() if rank < len(leaf.of_ranks)}
        yield {part: {name: replace(leaf, blocks=(leaf.of_ranks[rank],)) for name, leaf in here.items()}}


defect = Defect(("restored", "stored"), loads_by_dcp, _expected)
