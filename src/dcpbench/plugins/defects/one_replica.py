"""Ranks have different values under one name, and a checkpoint contains those of one of them.

Replicas never average their gradients (docs/findings/hsdp-one-shard.md), or each rank has weights for itself
(docs/findings/local-experts.md)."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from dcpbench.cell.cell import Cell
from dcpbench.cell.known_defects import LoadReference
from dcpbench.core.defects import Defect, Moment
from dcpbench.core.state import StatePart
from dcpbench.plugins.defects._cells import may_load_one_replica, never_averages
from dcpbench.runs.build_run import seeded_workload
from dcpbench.state.snapshot import DigestedLeaf, Leaf, Leaves, State, TensorLeaf, digested
from dcpbench.torch_private import IGNORED_BY_DDP
from dcpbench.workloads.parallelisms import ddp

_PARTS = (StatePart.model, StatePart.optimizer)


def _expected(cell: Cell, moment: Moment, reference: LoadReference) -> Iterator[State]:
    checkpoint, restored = reference.checkpoint, moment == "restored"
    state = checkpoint.state if restored else checkpoint.as_saved or checkpoint.state
    parts = _PARTS if restored or not never_averages(cell.config) else reference.names
    of_parts = {part: _possible(cell, state.get(part, {})) for part in parts}
    named: Mapping[StatePart, Any] = of_parts if restored else checkpoint.keyed(of_parts)
    names, possible_here = cell.world.gathered(reference.names), State()
    for part, leaves in named.items():
        wrong = {name for theirs in names for name in theirs.get(part, ())}
        tensors = {name: leaf for name, leaf in leaves.items() if isinstance(leaf, TensorLeaf | DigestedLeaf)}
        possible = {name: leaf for name, leaf in tensors.items() if name in wrong}
        possible_here[part] = digested(possible) if restored else possible
    yield from cell.world.gathered(possible_here)


def _possible(cell: Cell, leaves: Leaves) -> Leaves:
    """Return the leaves that can differ between ranks: all of separate replicas, else tensors that every rank
    has in full and trains. Of those DDP keeps all equal but the ones that the model has it ignore."""
    if never_averages(cell.config):
        return leaves
    ignored = None
    if cell.config.parallel.target == f"{ddp.__module__}.{ddp.__name__}":
        model = seeded_workload(cell.config, cell.world.device, cell.config.seed).model
        ignored = {*getattr(model, IGNORED_BY_DDP.name, ())}
    separate = {name: leaf for name, leaf in leaves.items() if _is_separate(leaf)}
    if ignored is None:
        return separate
    return {name: leaf for name, leaf in separate.items() if not ignored.isdisjoint(name)}


def _is_separate(leaf: Leaf) -> bool:
    if not isinstance(leaf, TensorLeaf | DigestedLeaf) or leaf.placements or leaf.kind == "buffer":
        return False
    return leaf.extent.numel == math.prod(leaf.extent.shape)


defect = Defect(("restored", "stored"), may_load_one_replica, _expected)
