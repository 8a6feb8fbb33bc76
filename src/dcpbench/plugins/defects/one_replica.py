"""Ranks have different values under one name, and a checkpoint contains those of one of them.

Replicas never average their gradients (docs/findings/hsdp-one-shard.md), or each rank has weights for itself
(docs/findings/local-experts.md)."""

from collections.abc import Iterator

from dcpbench.cell.cell import Cell
from dcpbench.cell.explained import Restored, StoredFiles
from dcpbench.config.schema import Config
from dcpbench.core.defects import Defect, Moment
from dcpbench.plugins.defects._cells import has_local_experts, never_averages
from dcpbench.verify.compare_layouts import gathered
from dcpbench.verify.snapshot import DigestedLeaf, Leaves, digested
from dcpbench.workloads.run_state import State


def _applies(config: Config) -> bool:
    return never_averages(config) or has_local_experts(config)


def _expected(cell: Cell, moment: Moment, reference: Restored | StoredFiles) -> Iterator[State]:
    return _restored(cell, reference) if isinstance(reference, Restored) else _stored(cell, reference)


def _restored(cell: Cell, reference: Restored) -> Iterator[State]:
    config, mine = cell.config, State()
    for check, leaves in reference.checkpoint.state.items():
        if has_local_experts(config) or (never_averages(config) and check in ("model_equal", "optim_equal")):
            mine[check] = leaves
    names = gathered(dict(reference.names), cell.world.group)
    for check, leaves in mine.items():
        wrong = {name for theirs in names for name in theirs.get(check, ())}
        some = digested({name: leaf for name, leaf in leaves.items() if name in wrong})
        mine[check] = {name: leaf for name, leaf in some.items() if isinstance(leaf, DigestedLeaf)}
    yield from gathered(mine, cell.world.group)


def _stored(cell: Cell, reference: StoredFiles) -> Iterator[State]:
    config, world = cell.config, cell.world
    wrong = {name for theirs in gathered(reference.names, world.group) for name in theirs}
    if not never_averages(config):
        wrong = {name for name in wrong if ".experts." in name}
    parts = enumerate(reference.checkpoint.by_key)
    mine: dict[str, Leaves] = {
        str(part): {key: leaf for key, leaf in leaves.items() if key in wrong} for part, leaves in parts
    }
    yield from gathered(mine, world.group)


defect = Defect(("restored", "stored"), _applies, _expected)
