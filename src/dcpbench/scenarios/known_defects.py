"""Which known defects of torch a cell is subject to, and what they make of its state and of its losses."""

import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from dcpbench.checkpointers.dcp import stored_chunks
from dcpbench.config.groups import ParallelConfig
from dcpbench.config.save import Kept
from dcpbench.core.mismatch import Mismatch
from dcpbench.scenarios.cell import Cell
from dcpbench.scenarios.checkpoint import Checkpoint, key_of, retained_state
from dcpbench.scenarios.plain_runs import copy_state, exchange_of
from dcpbench.verify.compare import compare
from dcpbench.verify.compare_layouts import gathered
from dcpbench.verify.known_defects import (
    AS_RESTORED,
    DIVIDED_TWICE,
    ONE_REPLICA,
    OTHER_SAVE,
    TRAINED_ALONE,
    UNFROZEN,
    mark_expected,
    mark_lists,
    mark_never_stepped,
    mark_own_chunks,
    mark_replica,
    mark_sliced,
)
from dcpbench.verify.plain_read import Stored, StoredChunk, compare_stored
from dcpbench.verify.snapshot import Leaves, named_parameters, of_kind
from dcpbench.verify.training import GradientPart, TwinGradient, compare_gradient
from dcpbench.verify.whole_tensors import Exchange
from dcpbench.workloads import build_run
from dcpbench.workloads.batches import Batches
from dcpbench.workloads.training_run import TrainingRun

_FSDP1 = "dcpbench.workloads.parallelisms.fsdp"

_NOT_RESTORED = {"multi_step", "data_loader_generator"}
"""A scheduler and a component that go on otherwise than they were saved."""

Mark = Callable[[Iterable[Mismatch], Callable[[TrainingRun], Iterable[Mismatch]]], Iterable[Mismatch]]
"""Has findings say which of them are not there beside a run with the defect."""


def before_load(cell: Cell, target: TrainingRun, checkpoint: Checkpoint) -> None:
    """Told before a checkpoint is loaded, which may leave some of the target as it is."""
    if not cell.config.save.uses_collectives:
        checkpoint.unrestored = retained_state(target)


def mark_restored(
    cell: Cell, check: str, found: Iterable[Mismatch], checkpoint: Checkpoint, actual: Leaves
) -> Iterable[Mismatch]:
    """What differs after a load, where it is what a known defect makes of what was saved; collective."""
    saved, sizes = checkpoint.state[check], _sizes(cell)
    for other in _sharing(cell, checkpoint):
        found = mark_expected(found, OTHER_SAVE, partial(compare, other.state[check], actual))
    if checkpoint.unrestored:
        stored = stored_chunks(Path(checkpoint.checkpoint_id), cell.world.rank)
        own = partial(_chunks_of, checkpoint, stored, check)
        found = mark_own_chunks(found, checkpoint.unrestored[check], actual, own)
    if check == "optim_equal" and cell.config.state_dict.full_state_dict:
        found = mark_lists(found, saved, actual)
    if check == "optim_equal" and not cell.config.load_into.filled:
        found = mark_never_stepped(found, actual)
    if check == "optim_equal" and sizes.get("tp", 1) > 1:
        return mark_sliced(found, saved, actual, checkpoint.recall_of(check), sizes["tp"])
    if check in ("model_equal", "optim_equal") and _never_averages(sizes):
        return mark_replica(found, saved, actual, cell.world.group)
    if _has_local_experts(cell):
        return mark_replica(found, saved, actual, cell.world.group)
    if check == "model_equal" and (buffers := of_kind("buffer", saved)):
        return mark_replica(found, buffers, actual, cell.world.group)
    return found


def mark_stored(
    cell: Cell, found: Iterable[Mismatch], checkpoint: Checkpoint, stored: Stored
) -> Iterable[Mismatch]:
    """What differs in the files of a checkpoint, where it is what another save had, or another rank."""
    world = cell.world
    if _never_averages(_sizes(cell)):
        found = _mark_stored_replicas(cell, found, checkpoint, stored)
    if _has_local_experts(cell):
        found = _mark_stored_replicas(cell, found, checkpoint, stored, of=".experts.")
    for other in _sharing(cell, checkpoint):
        theirs = compare_stored(other.by_key, stored, world.rank, world.size, world.device).found
        found = mark_expected(found, OTHER_SAVE, partial(list, theirs))
    return found


def _mark_stored_replicas(
    cell: Cell, found: Iterable[Mismatch], checkpoint: Checkpoint, stored: Stored, of: str = ""
) -> Iterable[Mismatch]:
    """Findings, those with `of` in their names marked where any rank had what is stored."""
    world, every = cell.world, list(found)
    marked: Iterable[Mismatch] = [one for one in every if of in one.name]
    names = {name for theirs in gathered([one.name for one in marked], world.group) for name in theirs}
    mine = [{key: leaf for key, leaf in one.items() if key in names} for one in checkpoint.by_key]
    for theirs in gathered(mine, world.group):
        differing = compare_stored(theirs, stored, world.rank, world.size, world.device).found
        marked = mark_expected(marked, ONE_REPLICA, partial(list, differing))
    return [*(one for one in every if of not in one.name), *marked]


@dataclass(frozen=True)
class GradientDefects:
    """What known defects make of gradients: replicas that train `alone`, frozen parameters that are trained,
    and gradients of experts that are divided by the number of ranks once more."""

    alone: bool
    unfrozen: frozenset[str]
    divided: tuple[str, ...]
    ranks: int

    def expected(self, name: str, twin: TwinGradient | None) -> TwinGradient | None:
        """Return the gradient that a parameter should have."""
        return None if name in self.unfrozen else twin

    def mark(
        self,
        finding: Mismatch,
        step: int,
        part: GradientPart,
        twin: TwinGradient | None,
        own: torch.Tensor | None,
    ) -> Mismatch:
        """Mark what was found of a gradient, if it is what a defect makes of the twin's; `own` is what the
        twin has of this rank's share of the batch alone."""
        name, others = finding.name, list[tuple[str, TwinGradient]]()
        if twin and self.alone and own is not None:
            others.append((TRAINED_ALONE, replace(twin, mean=own / self.ranks, factor_tolerance=None)))
        if twin and name in self.unfrozen:
            others.append((UNFROZEN, twin))
        if twin and name.startswith(self.divided):
            others.append((DIVIDED_TWICE, replace(twin, mean=twin.mean / self.ranks)))
        by = (by for by, other in others if compare_gradient(name, step, part, other)[0] is None)
        return replace(finding, by=next(by, None))


def gradients_of(cell: Cell, twin: TrainingRun) -> GradientDefects:
    """Which known defects of gradients a cell is subject to. The twin then has gradients of what they
    train."""
    sizes, frozen = _sizes(cell), _frozen(twin.model)
    if "tp" in sizes:
        _unfreeze(twin.model, cell.config.parallel.tp_plan)
    sums = cell.config.parallel.options.get("sums")
    divided = tuple(f"{name}." for name in cell.config.parallel.ep_plan) if sums else ()
    unfrozen = frozenset(frozen) - {*_frozen(twin.model)}
    return GradientDefects(_never_averages(sizes), unfrozen, divided, cell.world.size)


def resumed_by(cell: Cell, target: TrainingRun, data: Batches, until: int) -> Mark:
    """A way to mark what of a resumed run, which is yet to go on from what was restored, differs from the
    uninterrupted one, where it does not from what a plain run makes of the same until then, in cells that may
    be subject to a known defect; collective."""
    sizes, config = _sizes(cell), cell.config
    alone = _never_averages(sizes)
    in_part = _shares(cell) or not config.save.uses_collectives
    not_restored = _NOT_RESTORED & {config.scheduler.name, config.component.name}
    keeps_group = config.state_dict.full_state_dict and config.optimizer.name == "adamw_empty_group"
    in_another_state = bool(config.load_into.name != "default" or not_restored or keeps_group)
    in_another_state |= any(one.dtype is torch.bfloat16 for one in target.model.parameters())
    local = _has_local_experts(cell)
    if not (alone or sizes.get("tp", 1) > 1 or in_part or in_another_state or local):
        return lambda found, beside: found
    make = build_run.build_replica if alone else build_run.build if local else build_run.build_plain
    other = make(cell.config, cell.world, cell.config.seed)
    exchange = Exchange(None) if alone or local else exchange_of(cell.world, target)
    copy_state(target, other, exchange)
    _unfreeze(other.model, cell.config.parallel.tp_plan)
    other.train(data, until)
    return lambda found, beside: mark_expected(found, AS_RESTORED, lambda: beside(other))


def _sizes(cell: Cell) -> dict[str, int]:
    """Of the mesh under FSDP1; none under anything else, nor of a trainer, which nobody can recompute."""
    parallel: ParallelConfig = cell.config.parallel
    subject = parallel.target == _FSDP1 and not cell.config.own_trainer
    return parallel.mesh_sizes(cell.world.size) if subject else {}


def _chunks_of(checkpoint: Checkpoint, stored: Stored, check: str, name: str) -> Sequence[StoredChunk]:
    return stored.get(key_of(check, name, checkpoint.numbers), ())


def _shares(cell: Cell) -> bool:
    """Whether saves that are under way at once are given one writer, or one stager."""
    save = cell.config.save
    return Kept.shared in (save.writer, save.stager and save.stager.instance)


def _sharing(cell: Cell, checkpoint: Checkpoint) -> list[Checkpoint]:
    return checkpoint.beside if _shares(cell) else []


def _never_averages(sizes: dict[str, int]) -> bool:
    return sizes.get("dp_replicate", 1) > 1 and sizes.get("dp_shard") == 1


def _has_local_experts(cell: Cell) -> bool:
    return bool(cell.config.model.name == "local_experts")


def _frozen(model: nn.Module) -> list[str]:
    return [name for name, value in named_parameters(model).items() if not value.requires_grad]


def _unfreeze(model: nn.Module, tp_plan: Mapping[str, str]) -> None:
    for name, module in model.named_modules():
        if any(fnmatch.fnmatch(name, pattern) for pattern in tp_plan):
            module.requires_grad_(True)
