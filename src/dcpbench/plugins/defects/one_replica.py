"""Ranks have different values under one name, and a checkpoint contains those of one of them.

Replicas never average their gradients (docs/findings/hsdp-one-shard.md), or each rank has weights for itself
(docs/findings/local-experts.md)."""

import math
from collections.abc import Iterator

from dcpbench.cell.cell import Cell
from dcpbench.cell.explained import Restored, StoredFiles
from dcpbench.config.schema import Config
from dcpbench.core.defects import Defect, Moment
from dcpbench.plugins.defects._cells import loads_by_dcp, never_averages
from dcpbench.verify.compare_layouts import gathered
from dcpbench.verify.snapshot import DigestedLeaf, Leaf, Leaves, TensorLeaf, digested
from dcpbench.workloads.build_run import seeded_workload
from dcpbench.workloads.parallelisms import ddp
from dcpbench.workloads.run_state import State

_CHECKS = ("model_equal", "optim_equal")


def _applies(config: Config) -> bool:
    return never_averages(config) or loads_by_dcp(config)


def _expected(cell: Cell, moment: Moment, reference: Restored | StoredFiles) -> Iterator[State]:
    return _restored(cell, reference) if isinstance(reference, Restored) else _stored(cell, reference)


def _restored(cell: Cell, reference: Restored) -> Iterator[State]:
    mine, names = State(), gathered(dict(reference.names), cell.world.group)
    for check in _CHECKS:
        leaves = reference.checkpoint.state.get(check, {})
        wrong = {name for theirs in names for name in theirs.get(check, ())}
        some = digested({name: leaf for name, leaf in _possible(cell, leaves).items() if name in wrong})
        mine[check] = {name: leaf for name, leaf in some.items() if isinstance(leaf, DigestedLeaf)}
    yield from gathered(mine, cell.world.group)


def _stored(cell: Cell, reference: StoredFiles) -> Iterator[State]:
    world = cell.world
    wrong = {name for theirs in gathered(reference.names, world.group) for name in theirs}
    if not never_averages(cell.config):
        wrong = {key for key in wrong if key.startswith(("model.", "optimizer."))}
    mine = {
        check: {key: leaf for key, leaf in _possible(cell, leaves).items() if key in wrong}
        for check, leaves in reference.checkpoint.by_key.items()
    }
    yield from gathered(mine, world.group)


def _possible(cell: Cell, leaves: Leaves) -> Leaves:
    """Return the leaves that can differ between ranks: all of separate replicas, else tensors that every rank
    has in full and trains. Of those DDP keeps all equal but the ones that the model has it ignore."""
    if never_averages(cell.config):
        return leaves
    ignored = [""]
    if cell.config.parallel.target == f"{ddp.__module__}.{ddp.__name__}":
        model = seeded_workload(cell.config, cell.world.device, cell.config.seed).model
        ignored = getattr(model, "_ddp_params_and_buffers_to_ignore", [])
    separate = {name: leaf for name, leaf in leaves.items() if _is_separate(leaf)}
    return {name: leaf for name, leaf in separate.items() if any(f".{one}" in f".{name}" for one in ignored)}


def _is_separate(leaf: Leaf) -> bool:
    if not isinstance(leaf, TensorLeaf | DigestedLeaf) or leaf.placements or leaf.kind == "buffer":
        return False
    return leaf.extent.numel == math.prod(leaf.extent.shape)


defect = Defect(("restored", "stored"), _applies, _expected)
