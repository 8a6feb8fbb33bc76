"""Across layouts: two states whose parts lie differently are compared by the digests of their tensors,
without gathering them; only what differs is put together for a closer look."""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from dcpbench.records.findings import Finding, Problem
from dcpbench.verify.compare import Recall, compare, same_value
from dcpbench.verify.digest import Digest, add, digest, fetch
from dcpbench.verify.gather import contents, gathered
from dcpbench.verify.layout import Extent, whole
from dcpbench.verify.retain import DigestedLeaf
from dcpbench.verify.snapshot import Idle, Leaf, Leaves, TensorLeaf


@dataclass(frozen=True)
class WholeDigest:
    """What is known of a tensor without its elements, however it is cut over ranks. Plain data."""

    shape: tuple[int, ...]
    dtype: str
    digest: Digest
    kind: str = field(default="tensor", compare=False)


@dataclass(frozen=True)
class _Part:
    extent: Extent
    dtype: str
    digest: Digest
    kind: str


def digests(leaves: Leaves, group: dist.ProcessGroup | None) -> tuple[Leaves, list[Finding]]:
    """Every tensor as a `WholeDigest`, the same on all ranks; collective over `group`.

    Returns:
        the leaves, and what is wrong with their parts: as `contents` says it, but without places.
    """
    held = {name: leaf for name, leaf in leaves.items() if not isinstance(leaf, Idle)}
    tensors = {name: leaf for name, leaf in held.items() if isinstance(leaf, TensorLeaf)}
    values = fetch([digest(leaf.local, leaf.extent) for leaf in tensors.values()])
    mine: dict[str, Any] = dict(held)
    for (name, leaf), value in zip(tensors.items(), values, strict=True):
        mine[name] = _Part(leaf.extent, str(leaf.dtype), value, leaf.kind)
    for name, leaf in held.items():
        if isinstance(leaf, DigestedLeaf):
            mine[name] = _Part(leaf.extent, str(leaf.dtype), add(*leaf.blocks), leaf.kind)
    everybody = gathered(mine, group)
    together: Leaves = {}
    wrong: list[Finding] = []
    for name in dict.fromkeys(name for theirs in everybody for name in theirs):
        parts = {rank: theirs[name] for rank, theirs in enumerate(everybody) if name in theirs}
        together[name], finding = _together(name, parts)
        if finding:
            wrong.append(finding)
    return together, wrong


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
    retained = {name: leaf for name, leaf in saved.items() if name in names and name not in large}
    expected, wrong = contents(retained, group)
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
    for problem, one, other in (
        (Problem.dtype, leaf.dtype, str(actual.dtype)),
        (Problem.shape, leaf.shape, actual.extent.shape),
    ):
        if one != other:
            return Finding(name, problem, leaf.kind, facts={"saved": str(one), "restored": str(other)})
    corrupt = recall is not None and recall(name) is not None
    return Finding(name, Problem.digests_differ, leaf.kind, facts={"checkpoint_differs": corrupt})


def _together(name: str, parts: dict[int, Any]) -> tuple[Any, Finding | None]:
    rank, first = next(iter(parts.items()))
    if not isinstance(first, _Part):
        others = [other for other, value in parts.items() if not same_value(first, value)]
        if not others:
            return first, None
        return first, Finding(name, Problem.ranks_disagree, facts={"one_rank": rank, "other_rank": others[0]})
    distinct: dict[Extent, tuple[int, _Part]] = {}
    for other, part in parts.items():
        if part.extent.numel == 0:
            continue
        seen_by, seen = distinct.setdefault(part.extent, (other, part))
        if seen.digest != part.digest or seen.dtype != part.dtype:
            facts = {"one_rank": seen_by, "other_rank": other}
            return first, Finding(name, Problem.replicas, first.kind, facts=facts)
    total = add(*(part.digest for _, part in distinct.values()))
    together = WholeDigest(first.extent.shape, first.dtype, total, first.kind)
    held = sum(extent.numel for extent in distinct)
    elements = torch.Size(first.extent.shape).numel()
    if held != elements:
        facts = {"held": held, "elements": elements}
        return together, Finding(name, Problem.uncovered, first.kind, facts=facts)
    return together, None
