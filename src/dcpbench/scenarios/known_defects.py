"""Which known defects of torch a cell is subject to, and what they make of its state and of its losses."""

import fnmatch
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from dcpbench.config.groups import ParallelConfig
from dcpbench.records.findings import Finding
from dcpbench.scenarios.cell import Cell
from dcpbench.scenarios.checkpoint import Checkpoint
from dcpbench.verify.known_defects import (
    AS_RESTORED,
    TRAINED_ALONE,
    UNFROZEN,
    assembled,
    mark_expected,
    mark_replica,
    mark_sliced,
)
from dcpbench.verify.snapshot import (
    Leaves,
    below,
    named_parameters,
    persistent_tensors,
    snapshot_model,
    snapshot_optimizer,
)
from dcpbench.workloads import training_run
from dcpbench.workloads.training_run import Batches, TrainingRun

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


def resumed_by(cell: Cell, target: TrainingRun, data: Batches, until: int) -> Mark:
    """A way to mark what of a resumed run, which is yet to go on from what was restored, differs from the
    uninterrupted one, where it does not from what a plain run makes of the same until then; collective."""
    sizes = _sizes(cell)
    alone = _never_averages(sizes)
    if not (alone or sizes.get("tp", 1) > 1):
        return lambda found, beside: found
    make = training_run.build_replica if alone else training_run.build_plain
    other = make(cell.config, cell.world, cell.config.seed)
    group = None if alone else cell.world.checkpoint_group
    _set_model(other, assembled(snapshot_model(target.model), group))
    _set_optimizer(other, assembled(snapshot_optimizer(target.model, target.optimizer), group), target)
    _unfreeze(other.model, cell.config.parallel.tp_plan)
    other.scheduler.load_state_dict(target.scheduler.state_dict())
    other.noise.load_state_dict(target.noise.state_dict())
    other.train_state = replace(target.train_state, losses=[*target.train_state.losses])
    other.random.states = dict(target.random.states)
    other.train(data, until)
    return lambda found, beside: mark_expected(found, AS_RESTORED, lambda: beside(other))


@torch.no_grad()
def _set_model(run: TrainingRun, tensors: Leaves) -> None:
    for name, value in persistent_tensors(run.model).items():
        value.copy_(tensors[name])


def _set_optimizer(run: TrainingRun, tensors: Leaves, target: TrainingRun) -> None:
    names = {id(value): name for name, value in reversed(named_parameters(run.model).items())}
    parameters = (value for group in run.optimizer.param_groups for value in group["params"])
    state = {number: below(tensors, f"state.{names[id(one)]}.") for number, one in enumerate(parameters)}
    groups = target.optimizer.state_dict()["param_groups"]
    run.optimizer.load_state_dict({"state": state, "param_groups": groups})


def _sizes(cell: Cell) -> dict[str, int]:
    """Of the mesh under FSDP1; none under anything else, nor of a trainer, which nobody can recompute."""
    parallel: ParallelConfig = cell.config.parallel
    subject = parallel.target == _FSDP1 and not cell.config.own_trainer
    return parallel.mesh_sizes(cell.world.size) if subject else {}


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
