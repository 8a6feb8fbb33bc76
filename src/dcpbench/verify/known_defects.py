"""What known defects of torch make of a state. Of what a comparison found, that which is exactly what a
defect would have made of it says so (`Mismatch.by`): a failure that is known by its defect excuses nothing
else. `docs/findings/` describes the defects.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

from dcpbench.core.mismatch import Mismatch, Problem
from dcpbench.verify.compare import Recall, bits, same_value
from dcpbench.verify.compare_layouts import gathered
from dcpbench.verify.digest import Digest, add
from dcpbench.verify.plain_read import StoredChunk, part_of
from dcpbench.verify.snapshot import DigestedLeaf, Idle, Leaf, Leaves, TensorLeaf, block_digests

SLICED_BY_SHARD = "sliced_by_shard"
"""Under FSDP1 + TP what is set is a slice of the whole tensor, by offsets that are those of a TP shard."""
ONE_REPLICA = "one_replica"
"""Replicas that never average their gradients: what is loaded is what one of them had."""
TRAINED_ALONE = "trained_alone"
"""The same: each replica is what its own share of the batches makes of it."""
DIVIDED_TWICE = "divided_twice"
"""Of experts over one rank by `fully_shard`: gradients that are reduced by sums are divided twice."""
UNFROZEN = "unfrozen"
"""Under FSDP1 + TP frozen parameters that TP shards are trained."""
OTHER_SAVE = "other_save"
"""Saves that share what stages or writes them: what is saved, or loaded, is what another of them had."""
OWN_CHUNKS = "own_chunks"
"""A load without metadata of all ranks: what a rank has saved itself comes back, the rest is as before it."""
AS_RESTORED = "as_restored"
"""After a load that was wrong by a known defect: what a plain run makes of what was restored."""

AS_LIST = "as_list"
"""What is set from a full state dict has lists for tuples."""
NEVER_STEPPED = "never_stepped"
"""An optimizer's state was not loaded: it is what DCP gives one that has never stepped."""

_OF_TENSORS = (Problem.differs, Problem.digests_differ)


def mark_sliced(
    found: Iterable[Mismatch], saved: Leaves, actual: Leaves, recall: Recall, shards: int
) -> Iterator[Mismatch]:
    """Findings, marked where the restored part is what slicing made of the tensor that was saved.

    Args:
        saved: what was saved of this rank's parts, or the digests of whole tensors.
        actual: this rank's live parts.
        recall: what the checkpoint holds; believed where it is what was saved.
        shards: the degree of the tensor parallelism.
    """
    for finding in found:
        expected, part = saved.get(finding.name), actual.get(finding.name)
        if isinstance(part, TensorLeaf) and finding.problem in _OF_TENSORS:
            held = recall(finding.name) if part.extent.box != part.extent.shape else None
            if held is not None and _is_what_was(expected, held) and _is_slice(part, held, shards):
                finding = replace(finding, by=SLICED_BY_SHARD)
        yield finding


def mark_replica(
    found: Iterable[Mismatch], saved: Leaves, actual: Leaves, group: dist.ProcessGroup | None
) -> Iterator[Mismatch]:
    """Findings, marked where a rank's whole tensor is what any rank had saved; collective over `group`."""
    everybody = gathered({name: _digest(leaf) for name, leaf in saved.items()}, group)
    for finding in found:
        restored = _digest(actual.get(finding.name))
        theirs = [each.get(finding.name) for each in everybody]
        of_tensor = finding.problem in (*_OF_TENSORS, Problem.nan)  # which bits of several replicas may make
        same = of_tensor and restored is not None and restored in theirs
        yield replace(finding, by=ONE_REPLICA) if same else finding


def mark_own_chunks(
    found: Iterable[Mismatch], before: Leaves, actual: Leaves, own: Callable[[str], Sequence[StoredChunk]]
) -> Iterator[Mismatch]:
    """Findings, marked where this rank's part is what it was before the load, but for what it has stored
    itself.

    Args:
        before: this rank's parts before the load; large ones are not known.
        actual: its live parts.
        own: the chunks that this rank has stored, by the name of a tensor.
    """
    for finding in found:
        was, part = before.get(finding.name), actual.get(finding.name)
        of_tensor = finding.problem in (*_OF_TENSORS, Problem.replicas)
        if of_tensor and isinstance(was, TensorLeaf) and isinstance(part, TensorLeaf):
            expected = was.local.reshape(-1).cpu().clone()
            for chunk in own(finding.name):
                here = replace(chunk, read=partial(torch.ones, chunk.sizes, dtype=torch.bool))
                with suppress(ValueError):  # no element of it is this part's
                    stored = part_of(was.extent, [here])
                    expected[stored] = part_of(was.extent, [chunk])[stored]
            if torch.equal(bits(expected), bits(part.local.reshape(-1).cpu())):
                finding = replace(finding, by=OWN_CHUNKS)
        yield finding


def mark_lists(found: Iterable[Mismatch], saved: Leaves, actual: Leaves) -> Iterator[Mismatch]:
    """Findings, marked where what was a tuple is a list of the same."""
    for finding in found:
        was, became = saved.get(finding.name), actual.get(finding.name)
        same = isinstance(was, tuple) and same_value([*was], became)
        yield replace(finding, by=AS_LIST) if same else finding


def mark_never_stepped(found: Iterable[Mismatch], actual: Leaves) -> Iterator[Mismatch]:
    """Findings, marked where the restored part is zeros, or a counter of one step."""
    for finding in found:
        part = actual.get(finding.name)
        part = part.leaf if isinstance(part, Idle) else part
        if isinstance(part, TensorLeaf) and finding.problem in _OF_TENSORS:
            is_counter = finding.name.endswith(".step")
            if not bool((part.local != int(is_counter)).any()):
                finding = replace(finding, by=NEVER_STEPPED)
        yield finding


def mark_expected(
    found: Iterable[Mismatch], by: str, compare: Callable[[], Iterable[Mismatch]]
) -> Iterator[Mismatch]:
    """Findings, marked `by` a defect where holding the same against what it makes of a run finds nothing."""
    beside = {finding.name for finding in compare()}
    for finding in found:
        yield finding if finding.name in beside else replace(finding, by=by)


def _digest(leaf: Leaf) -> Digest | None:
    if isinstance(leaf, DigestedLeaf):
        return add(*leaf.blocks)
    return add(*block_digests([leaf])[0]) if isinstance(leaf, TensorLeaf) else None


def _is_what_was(saved: Leaf, held: torch.Tensor) -> bool:
    """Whether a whole tensor has at the place of a saved part what was saved."""
    if (tuple(held.shape), held.dtype) != (saved.extent.shape, saved.dtype):
        return False
    return _digest(TensorLeaf(saved.extent.take(held), saved.extent, None)) == _digest(saved)


def _is_slice(part: TensorLeaf, held: torch.Tensor, shards: int) -> bool:
    """Whether a part is a slice of the whole by its place in the TP shard; or, where what was restored was
    set once more, of the whole that such slices make up."""
    extent, mine = part.extent, part.local.reshape(-1).cpu()
    own = slice(extent.start, extent.start + extent.numel)
    cut = next(
        one for one, (box, size) in enumerate(zip(extent.box, extent.shape, strict=True)) if box != size
    )
    again = held.clone()
    for shard in again.chunk(shards, cut):
        shard.copy_(held.reshape(-1)[: shard.numel()].reshape(shard.shape))
    return any(torch.equal(bits(mine), bits(whole.reshape(-1)[own])) for whole in (held, again))
