"""State that outlives its moment: small parts are copied, of large ones only digests are retained.

So a cell can hold several checkpoints of a large model against what is restored from them, for a few
bytes each and at the speed of memory. A digest is made of each block, which tells roughly where a part
differs; what it was exactly the checkpoint can tell, if its content has the retained digests.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from dcpbench.verify.digest import Digest, digest, fetch
from dcpbench.verify.layout import Extent
from dcpbench.verify.snapshot import Idle, Leaf, Leaves, TensorLeaf

LARGE_BYTES = 4 * 2**20
"""Parts of more bytes are not copied."""
BLOCK = 2**22
"""Elements of a part that one digest is made of."""


@dataclass(frozen=True)
class DigestedLeaf:
    """A `TensorLeaf` without its elements: a digest for each `BLOCK` of them, in row-major order."""

    dtype: torch.dtype
    extent: Extent
    placements: str | None
    kind: str
    blocks: tuple[Digest, ...]


def retained(leaves: Leaves) -> Leaves:
    """The same leaves with nothing of the live state in them."""
    large = {
        name: leaf
        for name, leaf in leaves.items()
        if isinstance(leaf, TensorLeaf) and leaf.local.nbytes > LARGE_BYTES
    }
    blocks = iter(block_digests([(leaf.local, leaf.extent) for leaf in large.values()]))
    return {
        name: _digested(large[name], next(blocks)) if name in large else _copied(leaf)
        for name, leaf in leaves.items()
    }


def block_digests(parts: Sequence[tuple[torch.Tensor, Extent]]) -> list[tuple[Digest, ...]]:
    """The digests of each part's blocks; waits for the device once."""
    counted = [[digest(block, extent) for block, extent in _blocks(*part)] for part in parts]
    found = iter(fetch([one for blocks in counted for one in blocks]))
    return [tuple(next(found) for _ in blocks) for blocks in counted]


def _blocks(part: torch.Tensor, extent: Extent) -> Iterator[tuple[torch.Tensor, Extent]]:
    flat = part.reshape(-1)
    for begin in range(0, extent.numel, BLOCK):
        block = flat[begin : begin + BLOCK]
        yield block, replace(extent, start=extent.start + begin, numel=block.numel())


def _digested(leaf: TensorLeaf, blocks: tuple[Digest, ...]) -> DigestedLeaf:
    return DigestedLeaf(leaf.dtype, leaf.extent, leaf.placements, leaf.kind, blocks)


def _copied(leaf: Leaf) -> Leaf:
    """Values are copies already."""
    if isinstance(leaf, Idle):
        return Idle(_copied(leaf.leaf))
    if isinstance(leaf, TensorLeaf):
        return replace(leaf, local=leaf.local.clone(memory_format=torch.contiguous_format))
    return leaf
