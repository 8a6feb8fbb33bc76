"""Across layouts: states whose parts lie differently on the ranks are compared by content.

Tensors are compared by the digests of their parts, without gathering them. Only those that differ are put
together for a closer look, on every rank, a few at a time: from the live parts and their extents, and not by
torch's own gathering, which is part of what is under test.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from dcpbench.records.findings import Finding, Problem
from dcpbench.verify.compare import Recall, bits, compare, first_unequal, same_value
from dcpbench.verify.digest import Digest, add, digest, fetch
from dcpbench.verify.layout import Extent, whole
from dcpbench.verify.snapshot import DigestedLeaf, Idle, Leaf, Leaves, TensorLeaf

_BATCH_BYTES = 64 * 2**20


@dataclass(frozen=True)
class WholeDigest:
    """What is known of a tensor without its elements, however it is cut over ranks. Plain data."""

    shape: tuple[int, ...]
    dtype: str
    digest: Digest
    kind: str = field(default="tensor", compare=False)


@dataclass(frozen=True)
class _Packed:
    """A part on its way to another rank, as bytes: not every dtype can be pickled."""

    raw: TensorLeaf
    dtype: torch.dtype


def differing(saved: Leaves, actual: Leaves, group: dist.ProcessGroup | None) -> list[str]:
    """The names that differ by content, or whose replicas do; collective over `group`.

    Args:
        saved: live or retained parts, or what `digests` made of them.
        actual: live parts.
        group: of the ranks that hold the parts.
    """
    (expected, wrong), (found, also) = digests(saved, group), digests(actual, group)
    return list(dict.fromkeys(one.name for one in (*compare(expected, found), *wrong, *also)))


def compare_across(
    saved: Leaves, actual: Leaves, group: dist.ProcessGroup | None, recall: Recall | None = None
) -> list[Finding]:
    """What differs by content, with its place and values; collective over `group`.

    Args:
        saved: what was; of large parts its digests are enough.
        actual: what is.
        group: of the ranks that hold the parts.
        recall: asked for what was of a tensor of which some rank has only digests.
    """
    names = differing(saved, actual, group)
    if not names:
        return []
    without = {name for name, leaf in saved.items() if isinstance(leaf, DigestedLeaf | WholeDigest)}
    large = {name for theirs in gathered(without, group) for name in theirs}
    copied = {name: leaf for name, leaf in saved.items() if name in names and name not in large}
    expected, wrong = contents(copied, group)
    found, also = contents({name: leaf for name, leaf in actual.items() if name in names}, group)
    unknown: list[Finding] = []
    for name, leaf in digests({name: saved[name] for name in large & saved.keys()}, group)[0].items():
        if name in names and isinstance(leaf, WholeDigest):
            expected[name] = _recalled(name, leaf, recall)
            if finding := _by_digest(name, expected[name], found.get(name), recall):
                unknown.append(finding)
                del expected[name], found[name]
    closer = [*wrong, *also, *compare(expected, found), *unknown]
    explained = {one.name for one in closer}
    return closer + [Finding(name, Problem.digests_differ) for name in names if name not in explained]


def _recalled(name: str, leaf: WholeDigest, recall: Recall | None) -> Leaf:
    """The tensor with this digest, if it is what is recalled; else the digest itself."""
    held = recall(name) if recall else None
    if held is None or (tuple(held.shape), str(held.dtype)) != (leaf.shape, leaf.dtype):
        return leaf
    (value,) = fetch([digest(held, whole(held))])
    return TensorLeaf(held, whole(held), None, leaf.kind) if value == leaf.digest else leaf


def _by_digest(name: str, leaf: Leaf, actual: Leaf, recall: Recall | None) -> Finding | None:
    """What can be said of a tensor of which nothing but its digest is known any more."""
    if not isinstance(leaf, WholeDigest) or not isinstance(actual, TensorLeaf):
        return None
    dtype, shape = (leaf.dtype, str(actual.dtype)), (leaf.shape, actual.extent.shape)
    if finding := first_unequal(name, leaf.kind, {Problem.dtype: dtype, Problem.shape: shape}):
        return finding
    corrupt = recall is not None and recall(name) is not None
    return Finding(name, Problem.digests_differ, leaf.kind, facts={"checkpoint_differs": corrupt})


def digests(leaves: Leaves, group: dist.ProcessGroup | None) -> tuple[Leaves, list[Finding]]:
    """Every tensor as a `WholeDigest`, the same on all ranks; collective over `group`.

    Returns:
        the leaves, and what is wrong with their parts: as `contents` says it, but without places.
    """
    mine = {name: leaf for name, leaf in leaves.items() if not isinstance(leaf, Idle)}
    tensors = {name: leaf for name, leaf in mine.items() if isinstance(leaf, TensorLeaf)}
    values = fetch([digest(leaf.local, leaf.extent) for leaf in tensors.values()])
    for (name, leaf), value in zip(tensors.items(), values, strict=True):
        mine[name] = leaf.digested(value)
    everybody = gathered(mine, group)
    together: Leaves = {}
    wrong: list[Finding] = []
    for name in dict.fromkeys(name for theirs in everybody for name in theirs):
        together[name], finding = _add_up(name, _by_rank(name, everybody))
        wrong += [finding] if finding else []
    return together, wrong


def _add_up(name: str, held: Mapping[int, Any]) -> tuple[Leaf, Finding | None]:
    """The digest of a tensor from those of its parts; of what is no tensor the value of one rank."""
    first = next(iter(held.values()))
    if not isinstance(first, DigestedLeaf):
        return first, _disagreement(name, held)
    distinct: dict[Extent, tuple[int, Digest, torch.dtype]] = {}
    unlike: list[Finding] = []
    for rank, part in held.items():
        if part.extent.numel == 0:
            continue
        mine = rank, add(*part.blocks), part.dtype
        seen = distinct.setdefault(part.extent, mine)
        if seen[1:] != mine[1:]:
            facts = {"one_rank": seen[0], "other_rank": rank}
            unlike.append(Finding(name, Problem.replicas, first.kind, facts=facts))
    total = add(*(value for _, value, _ in distinct.values()))
    together = WholeDigest(first.extent.shape, str(first.dtype), total, first.kind)
    if unlike:
        return together, unlike[0]
    counts = {
        "held": sum(extent.numel for extent in distinct),
        "elements": torch.Size(first.extent.shape).numel(),
    }
    if counts["held"] != counts["elements"]:
        return together, Finding(name, Problem.uncovered, first.kind, facts=counts)
    return together, None


def contents(leaves: Leaves, group: dist.ProcessGroup | None) -> tuple[Leaves, list[Finding]]:
    """Every leaf as a whole on the CPU, the same on all ranks; collective over `group`.

    Returns:
        the leaves, and what is wrong with their parts: elements that no rank holds, replicas that
        are not the same bits, values on which the ranks do not agree.
    """
    leaves = {name: leaf for name, leaf in leaves.items() if not isinstance(leaf, Idle)}
    everything: Leaves = {}
    wrong: list[Finding] = []
    for names in _batches(leaves, group):
        everybody = gathered({name: _packed(leaves[name]) for name in names if name in leaves}, group)
        for name in names:
            held = {rank: _unpacked(value) for rank, value in _by_rank(name, everybody).items()}
            everything[name], finding = _put_together(name, held)
            wrong += [finding] if finding else []
    return everything, wrong


def _batches(leaves: Leaves, group: dist.ProcessGroup | None) -> Iterator[list[str]]:
    """The names of all ranks in one order, as many at a time as a rank may hold whole.

    An empty shard has no optimizer state: not every rank has every name.
    """
    sizes: dict[str, int] = {}
    for theirs in gathered({name: _bytes(leaf) for name, leaf in leaves.items()}, group):
        sizes.update(theirs)
    batch: list[str] = []
    total = 0
    for name, size in sizes.items():
        if batch and total + size > _BATCH_BYTES:
            yield batch
            batch, total = [], 0
        batch.append(name)
        total += size
    if batch:
        yield batch


def _bytes(leaf: Leaf) -> int:
    if not isinstance(leaf, TensorLeaf):
        return 1
    return torch.Size(leaf.extent.shape).numel() * leaf.dtype.itemsize


def gathered(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """What every rank gives, by rank."""
    if group is None:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def _by_rank(name: str, everybody: list[dict[str, Any]]) -> dict[int, Any]:
    return {rank: theirs[name] for rank, theirs in enumerate(everybody) if name in theirs}


def _packed(leaf: Leaf) -> Leaf | _Packed:
    if not isinstance(leaf, TensorLeaf):
        return leaf
    raw = leaf.local.cpu().contiguous().reshape(-1).view(torch.uint8)
    return _Packed(replace(leaf, local=raw), leaf.dtype)


def _unpacked(value: Leaf | _Packed) -> Leaf:
    if not isinstance(value, _Packed):
        return value
    return replace(value.raw, local=value.raw.local.view(value.dtype))


def _put_together(name: str, held: Mapping[int, Any]) -> tuple[Leaf, Finding | None]:
    """A whole tensor from its parts; of what is no tensor the value of one rank."""
    first = next(iter(held.values()))
    if not isinstance(first, TensorLeaf):
        return first, _disagreement(name, held, values=True)
    shapes = {(part.extent.shape, part.dtype) for part in held.values()}
    if len(shapes) > 1:
        facts: dict[str, Any] = {"shapes": sorted(map(str, shapes))}
        return first, Finding(name, Problem.ranks_disagree, facts=facts)
    tensor = torch.zeros(first.extent.shape, dtype=first.dtype)
    covered = torch.zeros(first.extent.shape, dtype=torch.bool)
    for part in held.values():
        part.extent.put(part.local, tensor)
        part.extent.put(torch.ones(part.local.shape, dtype=torch.bool), covered)
    leaf = TensorLeaf(tensor, whole(tensor), None, first.kind)
    if not covered.all():
        missing = covered.reshape(-1).logical_not()
        index = leaf.extent.global_index(int(missing.to(torch.uint8).argmax()))
        facts = {"uncovered": int(missing.sum()), "elements": missing.numel(), "index": index}
        return leaf, Finding(name, Problem.uncovered, facts=facts)
    return leaf, _drifted(name, held, tensor)


def _drifted(name: str, held: Mapping[int, TensorLeaf], tensor: torch.Tensor) -> Finding | None:
    """A replica that is not what was put together last at its place."""
    for rank, part in held.items():
        last = part.extent.take(tensor)
        differs = bits(part.local) != bits(last)
        if differs.any():
            first = int(differs.to(torch.uint8).argmax()) // (2 if tensor.is_complex() else 1)
            one, other = repr(part.local.reshape(-1)[first].item()), repr(last[first].item())
            facts = {"index": part.extent.global_index(first), "one": one, "one_rank": rank, "other": other}
            return Finding(name, Problem.replicas, facts=facts)
    return None


def _disagreement(name: str, held: Mapping[int, Any], values: bool = False) -> Finding | None:
    """The first two ranks that hold other values, and the `values` themselves where they are asked for."""
    (rank, first), *others = held.items()
    for other, value in others:
        if not same_value(first, value):
            facts: dict[str, Any] = {"one_rank": rank, "other_rank": other}
            facts |= {"one": repr(first), "other": repr(value)} if values else {}
            return Finding(name, Problem.ranks_disagree, facts=facts)
    return None
