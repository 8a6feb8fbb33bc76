"""Comparison of states that are sharded differently, by content.

The digests of a tensor's parts add up to the digest of the full tensor, so that no tensor is gathered. If a
tensor differs, each rank compares its part with the checkpoint.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from dcpbench.core.mismatch import Mismatch, Problem
from dcpbench.core.rank_report import NOTHING, Compared
from dcpbench.verify.compare import Recall, compare, same_value, with_place
from dcpbench.verify.digest import Digest, add
from dcpbench.verify.layout import Extent, whole
from dcpbench.verify.perturb import all_different
from dcpbench.verify.snapshot import DigestedLeaf, Idle, Leaf, Leaves, digested

_BY_DIGEST = (Problem.digests_differ, Problem.replicas)


def compare_across(
    saved: Leaves, actual: Leaves, group: dist.ProcessGroup | None, recall: Recall | None = None
) -> list[Mismatch]:
    """Return the mismatches of content and of replicas; collective over `group`.

    Args:
        saved: live or retained parts, or the result of `digests`.
        actual: live parts.
        group: the ranks that have the parts.
        recall: reads a tensor that differs from the checkpoint, to find out where it differs.
    """
    (expected, wrong), (found, also) = digests(saved, group), digests(actual, group)
    different = [*also, *compare(expected, found)]
    if not different:
        return wrong
    closer: list[Mismatch] = []
    drifted = {one.name: one for one in also if one.problem is Problem.replicas}
    for name, one in {one.name: one for one in different}.items():
        if one.problem not in _BY_DIGEST:
            continue
        here = with_place(drifted.get(name, one), expected[name], actual.get(name), recall)
        if here:
            of_replicas = name in drifted and here.problem is Problem.differs
            closer.append(replace(here, problem=Problem.replicas) if of_replicas else here)
    located = {name for names in gathered([one.name for one in closer], group) for name in names}
    others = [one for one in different if one.name not in located or one.problem not in _BY_DIGEST]
    return [*wrong, *closer, *others]


def compare_state(
    saved: Leaves,
    actual: Leaves,
    group: dist.ProcessGroup | None,
    recall: Recall | None = None,
    closely: bool = True,
    by_content: bool = False,
) -> list[Mismatch]:
    """Compare part by part, or by content, which is collective over `group`."""
    if by_content:
        return compare_across(saved, actual, group, recall)
    return compare(saved, actual, recall, closely)


def digests(leaves: Leaves, group: dist.ProcessGroup | None) -> tuple[Leaves, list[Mismatch]]:
    """Replace each tensor by the digest of the full tensor, the same on all ranks; collective over `group`.

    Returns:
        the leaves, and mismatches of their parts: elements that no rank has, replicas with different bits,
        values on which the ranks disagree.
    """
    mine = digested({name: leaf for name, leaf in leaves.items() if not isinstance(leaf, Idle)})
    for name, leaf in mine.items():
        if isinstance(leaf, DigestedLeaf):
            mine[name] = replace(leaf, blocks=(add(*leaf.blocks),))
    all_ranks = gathered(mine, group)
    together: Leaves = {}
    wrong: list[Mismatch] = []
    for name in dict.fromkeys(name for theirs in all_ranks for name in theirs):
        by_rank = {rank: theirs[name] for rank, theirs in enumerate(all_ranks) if name in theirs}
        together[name], finding = _add_up(name, by_rank)
        wrong += [finding] if finding else []
    return together, wrong


def compare_replicas(leaves: Leaves, group: dist.ProcessGroup | None) -> Compared:
    """Compare the tensors of which several ranks have the same part; collective over `group`. The control is
    a change on one rank."""
    extents = gathered({name: leaf.extent for name, leaf in leaves.items()}, group)
    names = dict.fromkeys(name for theirs in extents for name in theirs)
    last = {name: rank for name in names if (rank := _last_replica(name, extents)) is not None}
    if not last:
        return NOTHING
    here = dist.get_rank(group) if group else 0
    mine = {name: leaf for name, leaf in leaves.items() if name in last}
    changed = all_different({name: leaf for name, leaf in mine.items() if last[name] == here})
    all_ranks = gathered((digested(mine), digested(changed)), group)
    parts = {name: _parts_by_rank(name, [one for one, _ in all_ranks]) for name in last}
    found = [finding for name in last for finding in _unlike(name, parts[name])]
    controls = {name: {**parts[name], rank: all_ranks[rank][1][name]} for name, rank in last.items()}
    fired = {name: bool(_unlike(name, by_rank)) for name, by_rank in controls.items()}
    return Compared(found, dict.fromkeys(fired, True), fired)


def _parts_by_rank(name: str, all_ranks: Sequence[Leaves]) -> dict[int, DigestedLeaf]:
    """Return the parts of a tensor by rank, without empty parts."""
    by_rank = {rank: theirs[name] for rank, theirs in enumerate(all_ranks) if name in theirs}
    return {rank: part for rank, part in by_rank.items() if part.extent.numel}


def _last_replica(name: str, all_ranks: Sequence[Mapping[str, Extent]]) -> int | None:
    """Return the last rank whose part another rank has too; None if every rank has a different part."""
    ranks: dict[Extent, list[int]] = {}
    for rank, theirs in enumerate(all_ranks):
        if name in theirs and theirs[name].numel:
            ranks.setdefault(theirs[name], []).append(rank)
    return next((some[-1] for some in ranks.values() if len(some) > 1), None)


def _unlike(name: str, by_rank: Mapping[int, DigestedLeaf]) -> list[Mismatch]:
    added = {rank: replace(part, blocks=(add(*part.blocks),)) for rank, part in by_rank.items()}
    _, finding = _add_up(name, added)
    return [finding] if finding and finding.problem is Problem.replicas else []


def _add_up(name: str, by_rank: Mapping[int, Any]) -> tuple[Leaf, Mismatch | None]:
    """Return the digest of a tensor from the digests of its parts; for another value that of one rank."""
    first = next(iter(by_rank.values()))
    if not isinstance(first, DigestedLeaf):
        if name.endswith(".params") and (joined := _joined(by_rank)):
            return joined, None
        return first, _disagreement(name, by_rank)
    shapes = {(part.extent.shape, part.dtype) for part in by_rank.values()}
    if len(shapes) > 1:
        facts: dict[str, Any] = {"shapes": sorted(map(str, shapes))}
        return first, Mismatch(name, Problem.ranks_disagree, facts=facts)
    distinct: dict[Extent, tuple[int, Digest]] = {}
    unlike: list[Mismatch] = []
    for rank, part in by_rank.items():
        if part.extent.numel == 0:
            continue
        first_part = distinct.setdefault(part.extent, (rank, part.blocks[0]))
        if first_part[1] != part.blocks[0]:
            facts = {"one_rank": first_part[0], "other_rank": rank}
            unlike.append(Mismatch(name, Problem.replicas, first.kind, facts=facts))
    total = add(*(value for _, value in distinct.values()))
    extent = whole(torch.empty(first.extent.shape, device="meta"))
    together = replace(first, extent=extent, placements=None, blocks=(total,))
    if unlike:
        return together, unlike[0]
    counts = {"held": sum(part.numel for part in distinct), "elements": extent.numel}
    if counts["held"] != counts["elements"]:
        return together, Mismatch(name, Problem.uncovered, first.kind, facts=counts)
    return together, None


def _joined(by_rank: Mapping[int, Any]) -> list[str] | None:
    """Return the names of a group's parameters on all stages of a pipeline; None if different stages share a
    name."""
    parts = {str(names): names for names in by_rank.values()}  # in a control they need not be names
    names = [name for part in parts.values() for name in part]
    return names if len({*map(str, names)}) == len(names) else None


def _disagreement(name: str, by_rank: Mapping[int, Any]) -> Mismatch | None:
    """Return a mismatch of the first two ranks whose values differ."""
    (rank, first), *others = by_rank.items()
    for other, value in others:
        if not same_value(first, value):
            facts = {"one_rank": rank, "one": repr(first), "other_rank": other, "other": repr(value)}
            return Mismatch(name, Problem.ranks_disagree, facts=facts)
    return None


def gathered(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Return the values of all ranks, by rank; collective."""
    if group is None:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values
