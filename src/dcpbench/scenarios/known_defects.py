"""Which known defects of torch a cell is subject to, and what they make of its state and of its losses."""

import fnmatch
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from dcpbench.config.groups import ParallelConfig
from dcpbench.records.findings import Finding
from dcpbench.scenarios.cell import Cell
from dcpbench.scenarios.checkpoint import Checkpoint
from dcpbench.verify.known_defects import (
    TRAINED_ALONE,
    UNFROZEN,
    against_whole,
    mark_expected,
    mark_replica,
    mark_sliced,
)
from dcpbench.verify.snapshot import Leaves, named_parameters
from dcpbench.workloads import training_run
from dcpbench.workloads.training_run import TrainingRun

if TYPE_CHECKING:
    from dcpbench.scenarios.steps import Oracle

_FSDP1 = "dcpbench.workloads.parallelisms.fsdp"

Mark = Callable[[Iterable[Finding], Callable[[TrainingRun], Iterable[Finding]]], Iterable[Finding]]
"""Has findings say which of them are not there beside a run with the defect."""


def mark_restored(
    cell: Cell, check: str, found: Iterable[Finding], checkpoint: Checkpoint, actual: Leaves
) -> Iterable[Finding]:
    """What differs after a load, where it is what a known defect makes of what was saved; collective."""
    saved, sizes = checkpoint.state[check], _sizes(cell)
    if check == "optim_equal" and sizes.get("tp", 1) > 1:
        return mark_sliced(found, saved, actual, checkpoint.recall_of(check), sizes["tp"])
    if check in ("model_equal", "optim_equal") and _never_averages(sizes):
        return mark_replica(found, saved, actual, cell.world.checkpoint_group)
    return found


def scale_resumed(cell: Cell, found: Iterable[Finding], expected: Leaves) -> Iterable[Finding]:
    """What differs after steps from what a known defect has sliced, against whole tensors; collective."""
    tp = _sizes(cell).get("tp", 1)
    return against_whole(found, expected, cell.world.checkpoint_group) if tp > 1 else found


def marked_by(cell: Cell, oracle: "Oracle") -> Mark:
    """A way to mark what of the trained run differs from the twin, where it does not differ from a twin that
    is subject to what the cell is; collective."""
    sizes, frozen = _sizes(cell), _frozen(oracle.twin.model)
    if _never_averages(sizes):
        by, other = TRAINED_ALONE, training_run.build_replica(cell.config, cell.world, cell.config.seed)
        _copy(oracle.trained.model, other.model, frozen)
    elif frozen and "tp" in sizes:
        by, other = UNFROZEN, training_run.build_plain(cell.config, cell.world, cell.config.seed)
        _copy(oracle.twin.model, other.model, frozen)
        _unfreeze(other.model, cell.config.parallel.tp_plan)
    else:
        return lambda found, beside: found
    other.train(oracle.data, oracle.trained.train_state.step)
    return lambda found, beside: mark_expected(found, by, lambda: beside(other))


def _sizes(cell: Cell) -> dict[str, int]:
    """Of the mesh under FSDP1; none under anything else."""
    parallel: ParallelConfig = cell.config.parallel
    return parallel.mesh_sizes(cell.world.size) if parallel.target == _FSDP1 else {}


def _never_averages(sizes: dict[str, int]) -> bool:
    return sizes.get("dp_replicate", 1) > 1 and sizes.get("dp_shard") == 1


def _frozen(model: nn.Module) -> list[str]:
    return [name for name, value in named_parameters(model).items() if not value.requires_grad]


@torch.no_grad()
def _copy(source: nn.Module, model: nn.Module, names: list[str]) -> None:
    """Give a plain model these parameters of another, which has the whole of them here."""
    values, mine = named_parameters(source), named_parameters(model)
    for name in names:
        mine[name].copy_(values[name].view_as(mine[name]))


def _unfreeze(model: nn.Module, tp_plan: Mapping[str, str]) -> None:
    for name, module in model.named_modules():
        if any(fnmatch.fnmatch(name, pattern) for pattern in tp_plan):
            module.requires_grad_(True)
