"""Comparison of states that are sharded differently, by content.

The digests of a tensor's parts add up to the digest of the full tensor, so that no tensor is gathered. If a
tensor differs, each rank compares its part with the checkpoint.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from dcpbench.compare.controls import perturbed_leaves
from dcpbench.compare.leaves import (
    TensorReader,
    differences_by_name,
    same_value,
    sorted_parameters,
    with_location,
)
from dcpbench.core.mismatch import Mismatch, Problem
from dcpbench.core.rank_report import Compared
from dcpbench.core.state import Name, text_of
from dcpbench.state.digest import Digest, add
from dcpbench.state.layout import Extent, whole
from dcpbench.state.snapshot import (
    DigestedLeaf,
    EmptyShard,
    Leaf,
    Leaves,
    TensorLeaf,
    digested,
    names_parameters,
)

_BY_DIGEST = (Problem.digests_differ, Problem.replicas)


def compare_across(
    saved: Leaves, actual: Leaves, group: dist.ProcessGroup | None, read_saved: TensorReader | None = None
) -> list[Mismatch]:
    """Return the mismatches of content and of replicas; collective over `group`.

    Args:
        saved: live or retained parts, or the result of `digests_of_full`.
        actual: live parts.
        group: the ranks that have the parts.
        read_saved: reads a tensor that differs from the checkpoint, to find out where it differs.
    """
    (expected, wrong), (actual_digests, also) = digests_of_full(saved, group), digests_of_full(actual, group)
    also = {
        name: mismatch
        for name, mismatch in also.items()
        if not _same_on_each_rank(expected.get(name), actual_digests[name])
    }
    different = [*also.items(), *differences_by_name(expected, actual_digests).items()]
    if not different:
        return [*wrong.values()]
    closer: dict[Name, Mismatch] = {}
    drifted = {name: mismatch for name, mismatch in also.items() if mismatch.problem is Problem.replicas}
    for name, mismatch in dict(different).items():
        if mismatch.problem not in _BY_DIGEST:
            continue
        here = with_location(name, drifted.get(name, mismatch), expected[name], actual.get(name), read_saved)
        if here:
            of_replicas = name in drifted and here.problem is Problem.differs
            closer[name] = replace(here, problem=Problem.replicas) if of_replicas else here
    located = set[Name]().union(*gathered_values({*closer}, group))
    others = [
        mismatch for name, mismatch in different if name not in located or mismatch.problem not in _BY_DIGEST
    ]
    return [*wrong.values(), *closer.values(), *others]


def _same_on_each_rank(expected: Leaf, actual: Leaf) -> bool:
    of_ranks = getattr(actual, "of_ranks", ())
    return bool(of_ranks) and of_ranks == getattr(expected, "of_ranks", ())


def digests_of_full(leaves: Leaves, group: dist.ProcessGroup | None) -> tuple[Leaves, dict[Name, Mismatch]]:
    """Replace each tensor by the digest of the full tensor, the same on all ranks; collective over `group`.

    Returns:
        the leaves, and mismatches of their parts by name: elements that no rank has, replicas with different
        bits, values on which the ranks disagree.
    """
    digests_here = digested({name: leaf for name, leaf in leaves.items() if not isinstance(leaf, EmptyShard)})
    for name, leaf in digests_here.items():
        if isinstance(leaf, DigestedLeaf):
            digests_here[name] = replace(leaf, blocks=(add(*leaf.blocks),))
    all_ranks = gathered_values(digests_here, group)
    together: Leaves = {}
    wrong: dict[Name, Mismatch] = {}
    for name in dict.fromkeys(name for theirs in all_ranks for name in theirs):
        by_rank = {rank: theirs[name] for rank, theirs in enumerate(all_ranks) if name in theirs}
        together[name], finding = _add_up(name, by_rank)
        if finding:
            wrong[name] = finding
    return together, wrong


def compare_ranks(leaves: Leaves, group: dist.ProcessGroup | None) -> tuple[Leaves, Compared]:
    """Return the `digests_of_full`, and what is wrong with their parts. The control is another value on the
    last rank, of each name that is wrong; collective over `group`."""
    together, wrong = digests_of_full(leaves, group)
    broken = {name: leaves[name] for name in wrong if name in leaves}
    if group is None or dist.get_rank(group) == dist.get_world_size(group) - 1:
        broken = perturbed_leaves(broken)
    control = digests_of_full(broken, group)[1] if wrong else {}  # wrong on all ranks, or on none
    return together, Compared.of(wrong.values(), control.values(), map(text_of, wrong))


@dataclass(frozen=True)
class _Copy:
    """A rank's part of a tensor that other ranks have too: the kind of state, and its content; on the last of
    these ranks also that after a change."""

    extent: Extent
    kind: str
    content: Any
    changed: Any


def compare_replicas(leaves: Mapping[Name, TensorLeaf], group: dist.ProcessGroup | None) -> Compared:
    """Compare the tensors of which several ranks have the same part; collective over `group`. The control is
    a change on one rank."""
    extents = gathered_values({name: leaf.extent for name, leaf in leaves.items()}, group)
    here = dist.get_rank(group) if group else 0
    replicated, last = dict[Name, TensorLeaf](), dict[Name, TensorLeaf]()
    for name, leaf in leaves.items():
        having = [rank for rank, theirs in enumerate(extents) if theirs.get(name) == leaf.extent]
        if len(having) > 1 and leaf.extent.numel:
            replicated[name] = leaf
            if here == having[-1]:
                last[name] = leaf
    contents, changed = _contents(replicated), _contents(perturbed_leaves({**last}))
    copies = {
        name: _Copy(leaf.extent, leaf.kind, contents[name], changed.get(name))
        for name, leaf in replicated.items()
    }
    all_ranks = gathered_values(copies, group)
    mismatches: list[Mismatch] = []
    detected: dict[str, bool] = {}
    for name in dict.fromkeys(name for theirs in all_ranks for name in theirs):
        text, replicas = text_of(name), dict[Extent, list[tuple[int, _Copy]]]()
        for rank, theirs in enumerate(all_ranks):
            if name in theirs:
                replicas.setdefault(theirs[name].extent, []).append((rank, theirs[name]))
        for (first, copied), *others in replicas.values():
            unlike = [rank for rank, copied_there in others if copied_there.content != copied.content]
            if unlike:
                facts = {"one_rank": first, "other_rank": unlike[0]}
                mismatches.append(Mismatch(text, Problem.replicas, copied.kind, facts=facts))
            changes = others[-1][1].changed not in (None, copied.content)
            detected[text] = changes and detected.get(text, True)
    return Compared(mismatches, dict.fromkeys(detected, True), detected)


def _contents(leaves: Mapping[Name, TensorLeaf]) -> dict[Name, Any]:
    """Return what identifies the content of each part: on a GPU the digests, which need no copy; on the CPU a
    hash, which is ten times faster."""
    of_gpu = {name: leaf for name, leaf in leaves.items() if leaf.local.is_cuda}
    on_gpu = digested(of_gpu) if of_gpu else {}
    return {
        name: on_gpu[name].blocks if name in on_gpu else _hash(leaf.local) for name, leaf in leaves.items()
    }


def _hash(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return hashlib.sha256(plain.reshape(-1).view(torch.uint8).numpy().data).digest()


def _add_up(name: Name, by_rank: Mapping[int, Any]) -> tuple[Leaf, Mismatch | None]:
    """Return the digest of a tensor from the digests of its parts; for another value that of one rank."""
    first = next(iter(by_rank.values()))
    if not all(isinstance(leaf, DigestedLeaf) for leaf in by_rank.values()):
        are_names = all(names_parameters(name, leaf) for leaf in by_rank.values())
        joined = _joined(by_rank) if are_names else None
        return (joined, None) if joined else (first, _disagreement(name, by_rank))
    shapes = {(leaf.extent.shape, leaf.dtype) for leaf in by_rank.values()}
    if len(shapes) > 1:
        facts: dict[str, Any] = {"shapes": sorted(map(str, shapes))}
        return first, Mismatch(text_of(name), Problem.ranks_disagree, facts=facts)
    distinct: dict[Extent, tuple[int, Digest]] = {}
    unlike: list[Mismatch] = []
    for rank, leaf in by_rank.items():
        if leaf.extent.numel == 0:
            continue
        first_part = distinct.setdefault(leaf.extent, (rank, leaf.blocks[0]))
        if first_part[1] != leaf.blocks[0]:
            facts = {"one_rank": first_part[0], "other_rank": rank}
            unlike.append(Mismatch(text_of(name), Problem.replicas, first.kind, facts=facts))
    total = add(*(part_digest for _, part_digest in distinct.values()))
    extent = whole(torch.empty(first.extent.shape, device="meta"))
    together = replace(first, extent=extent, placements=None, blocks=(total,))
    if unlike:
        is_full = all(leaf.extent == extent for leaf in by_rank.values())
        of_ranks = tuple(leaf.blocks[0] for leaf in by_rank.values()) if is_full else ()
        return replace(together, of_ranks=of_ranks), unlike[0]
    counts = {"held": sum(extent_of_part.numel for extent_of_part in distinct), "elements": extent.numel}
    if counts["held"] != counts["elements"]:
        return together, Mismatch(text_of(name), Problem.uncovered, first.kind, facts=counts)
    return together, None


def _joined(by_rank: Mapping[int, Any]) -> list[str] | None:
    """Return the names of a group's parameters on all stages of a pipeline; None if different stages share a
    name."""
    # In a control they need not be names.
    parts = {str(sorted_parameters(names)): names for names in by_rank.values()}
    names = [name for listed_names in parts.values() for name in listed_names]
    return names if len({*map(str, names)}) == len(names) else None


def _disagreement(name: Name, by_rank: Mapping[int, Any]) -> Mismatch | None:
    """Return a mismatch of the first two ranks whose values differ."""
    (rank, first), *others = by_rank.items()
    for other_rank, other_value in others:
        if not same_value(first, other_value):
            facts = {
                "one_rank": rank,
                "one": repr(first),
                "other_rank": other_rank,
                "other": repr(other_value),
            }
            return Mismatch(text_of(name), Problem.ranks_disagree, facts=facts)
    return None


def gathered_values(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Return the values of all ranks, by rank; collective."""
    if group is None:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values
