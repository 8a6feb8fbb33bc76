"""Across layouts: two states whose parts lie differently are compared by the digests of their tensors,
without gathering them; only what differs is put together for a closer look."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from dcpbench.verify.compare import Mismatch, Recall, compare, same_value
from dcpbench.verify.digest import Digest, add, digest, fetch
from dcpbench.verify.gather import contents, gathered
from dcpbench.verify.layout import Extent, whole
from dcpbench.verify.retain import DigestedLeaf
from dcpbench.verify.snapshot import Idle, Leaves, TensorLeaf, kind_of


@dataclass(frozen=True)
class Digested:
    """What is known of a tensor without its elements."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    digest: Digest


@dataclass(frozen=True)
class _Part:
    extent: Extent
    dtype: torch.dtype
    digest: Digest


def digests(leaves: Leaves, group: dist.ProcessGroup | None) -> tuple[Leaves, list[Mismatch]]:
    """Every tensor as a `Digested`, the same on all ranks; collective over `group`.

    Returns:
        the leaves, and what is wrong with their parts: as `contents` tells it, but without places.
    """
    held = {name: leaf for name, leaf in leaves.items() if not isinstance(leaf, Idle)}
    tensors = {name: leaf for name, leaf in held.items() if isinstance(leaf, TensorLeaf)}
    values = fetch([digest(leaf.local, leaf.extent) for leaf in tensors.values()])
    mine: dict[str, Any] = dict(held)
    for (name, leaf), value in zip(tensors.items(), values, strict=True):
        mine[name] = _Part(leaf.extent, leaf.dtype, value)
    for name, leaf in held.items():
        if isinstance(leaf, DigestedLeaf):
            mine[name] = _Part(leaf.extent, leaf.dtype, add(*leaf.blocks))
    everybody = gathered(mine, group)
    together: Leaves = {}
    wrong: list[Mismatch] = []
    for name in dict.fromkeys(name for theirs in everybody for name in theirs):
        parts = {rank: theirs[name] for rank, theirs in enumerate(everybody) if name in theirs}
        together[name], complaint = _together(parts)
        if complaint:
            wrong.append(Mismatch(name, complaint))
    return together, wrong


def differing(saved: Leaves, actual: Leaves, group: dist.ProcessGroup | None) -> list[str]:
    """The names that differ by content, or whose replicas do; collective over `group`."""
    (expected, wrong), (found, also) = digests(saved, group), digests(actual, group)
    names = [mismatch.name for mismatch in (*compare(expected, found), *wrong, *also)]
    return list(dict.fromkeys(names))


def compare_across(
    saved: Leaves, actual: Leaves, group: dist.ProcessGroup | None, recall: Recall | None = None
) -> list[Mismatch]:
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
    mine = {name for name, leaf in saved.items() if isinstance(leaf, DigestedLeaf)}
    large = {name for theirs in gathered(mine, group) for name in theirs}
    (expected, wrong), (found, also) = (
        contents({name: leaf for name, leaf in leaves.items() if name in wanted}, group)
        for leaves, wanted in ((saved, set(names) - large), (actual, set(names)))
    )
    for name in large.intersection(names):
        held = recall(name) if recall else None
        if held is not None:
            expected[name] = TensorLeaf(held, whole(held), None, kind_of(name, saved.get(name)))
        else:
            found.pop(name, None)
    closer = [*wrong, *also, *compare(expected, found)]
    told = {mismatch.name for mismatch in closer}
    return closer + [Mismatch(name, "its digests differ") for name in names if name not in told]


def _together(parts: dict[int, Any]) -> tuple[Any, str | None]:
    rank, first = next(iter(parts.items()))
    if not isinstance(first, _Part):
        others = [other for other, value in parts.items() if not same_value(first, value)]
        return first, f"rank {rank} and rank {others[0]} have other values" if others else None
    distinct: dict[Extent, tuple[int, _Part]] = {}
    for other, part in parts.items():
        if part.extent.numel == 0:
            continue
        seen_by, seen = distinct.setdefault(part.extent, (other, part))
        if seen.digest != part.digest or seen.dtype != part.dtype:
            return first, f"replicas differ: rank {seen_by} and rank {other} have other bits in one part"
    whole = Digested(first.extent.shape, first.dtype, add(*(part.digest for _, part in distinct.values())))
    held = sum(extent.numel for extent in distinct)
    total = torch.Size(first.extent.shape).numel()
    if held != total:
        return whole, f"the ranks' parts hold {held} of {total} elements"
    return whole, None
