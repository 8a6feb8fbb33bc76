"""State by content: every tensor put together from the parts that all ranks hold of it.

Two layouts of one state have different parts, but one content. It is put together on every rank, a
few tensors at a time, from the live parts and their extents and not by torch's own gathering, which
is part of what is under test.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from dcpbench.records.findings import Finding, Problem
from dcpbench.verify.compare import bits, same_value
from dcpbench.verify.layout import Extent, whole
from dcpbench.verify.snapshot import Idle, Leaves, TensorLeaf

_BATCH_BYTES = 64 * 2**20

Part = tuple[Extent, torch.Tensor, str]
"""Where it lies, what it holds, and its kind."""


@dataclass(frozen=True)
class _Packed:
    """A part on its way to another rank."""

    extent: Extent
    raw: torch.Tensor
    dtype: torch.dtype
    kind: str


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
        mine = {name: _portable(leaves[name]) for name in names if name in leaves}
        theirs = gathered(mine, group)
        for name in names:
            held = {rank: _arrived(values[name]) for rank, values in enumerate(theirs) if name in values}
            everything[name], finding = _put_together(name, held)
            if finding:
                wrong.append(finding)
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


def gathered(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """What every rank gives, by rank."""
    if group is None:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def _bytes(leaf: Any) -> int:
    if not isinstance(leaf, TensorLeaf):
        return 1
    return torch.Size(leaf.extent.shape).numel() * leaf.dtype.itemsize


def _portable(leaf: Any) -> Any:
    """A part goes as bytes: not every dtype can be pickled."""
    if not isinstance(leaf, TensorLeaf):
        return leaf
    raw = leaf.local.cpu().contiguous().reshape(-1).view(torch.uint8)
    return _Packed(leaf.extent, raw, leaf.dtype, leaf.kind)


def _arrived(value: Any) -> Any:
    return (value.extent, value.raw.view(value.dtype), value.kind) if isinstance(value, _Packed) else value


def _put_together(name: str, held: dict[int, Any]) -> tuple[Any, Finding | None]:
    first_rank, first = next(iter(held.items()))
    if not isinstance(first, tuple) or not isinstance(first[0], Extent):
        others = [rank for rank, value in held.items() if not same_value(first, value)]
        if not others:
            return first, None
        ranks = {"one_rank": first_rank, "other_rank": others[0]}
        facts: dict[str, Any] = {**ranks, "one": repr(first), "other": repr(held[others[0]])}
        return first, Finding(name, Problem.ranks_disagree, facts=facts)
    shapes = {(part[0].shape, part[1].dtype) for part in held.values()}
    if len(shapes) > 1:
        facts = {"shapes": sorted(map(str, shapes))}
        return first, Finding(name, Problem.ranks_disagree, facts=facts)
    tensor = torch.zeros(first[0].shape, dtype=first[1].dtype)
    covered = torch.zeros(first[0].shape, dtype=torch.bool)
    for extent, part, _ in held.values():
        extent.put(part, tensor)
        extent.put(torch.ones(part.shape, dtype=torch.bool), covered)
    leaf = TensorLeaf(tensor, whole(tensor), None, first[2])
    if not covered.all():
        missing = covered.reshape(-1).logical_not()
        index = leaf.extent.global_index(int(missing.to(torch.uint8).argmax()))
        facts = {"uncovered": int(missing.sum()), "elements": missing.numel(), "index": index}
        return leaf, Finding(name, Problem.uncovered, facts=facts)
    return leaf, _drifted(name, held, tensor)


def _drifted(name: str, held: dict[int, Part], tensor: torch.Tensor) -> Finding | None:
    """A replica that is not what was put together last at its place."""
    for rank, (extent, part, _) in held.items():
        last = extent.take(tensor)
        differs = bits(part) != bits(last)
        if differs.any():
            first = int(differs.to(torch.uint8).argmax())
            if tensor.is_complex():
                first //= 2
            one, other = repr(part.reshape(-1)[first].item()), repr(last[first].item())
            facts = {"index": extent.global_index(first), "one": one, "one_rank": rank, "other": other}
            return Finding(name, Problem.replicas, facts=facts)
    return None
