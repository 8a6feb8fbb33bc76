"""Where the steps of a cell plant its fault, if it has one; see `dcpbench.faults`."""

import copy
import pkgutil
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.stateful import Stateful

from dcpbench.config.groups import Place
from dcpbench.faults.staged import Staged
from dcpbench.faults.targets import Site
from dcpbench.scenarios.cell import Cell
from dcpbench.verify.snapshot import Leaves
from dcpbench.workloads.training_run import Trainee

_FIRST_ID, _FIRST_LEAVES, _FIRST_STAGED = "checkpoint id", "leaves", "staged state"


def remember(cell: Cell, checkpoint_id: str, leaves: Leaves) -> None:
    """Keep the first save of a cell for the faults that bring it back."""
    if cell.config.fault.target:
        cell.memory.setdefault(_FIRST_ID, checkpoint_id)
        cell.memory.setdefault(_FIRST_LEAVES, leaves)


def restored(cell: Cell, target: Trainee) -> None:
    """Damage what was loaded."""
    _at_trainee(cell, Place.restored, target)


def live(cell: Cell, trainee: Trainee) -> None:
    """Damage the live state right after a save."""
    _at_trainee(cell, Place.live, trainee)


def staged(cell: Cell, state: dict[str, Any]) -> dict[str, Any]:
    """What is saved: the state that was given, or a damaged copy of it."""
    if not _wanted(cell, Place.staged):
        return state
    copied = {
        name: copy.deepcopy(each.state_dict() if isinstance(each, Stateful) else each)
        for name, each in state.items()
    }
    first = cell.memory.setdefault(_FIRST_STAGED, copy.deepcopy(copied))
    with torch.no_grad():
        _plant(cell, Staged(copied, first, cell.world.rank, cell.world.size))
    return copied


def written(cell: Cell, checkpoint_id: str) -> None:
    """Damage the files of a complete checkpoint, on rank 0, before any rank goes on."""
    if not _wanted(cell, Place.written):
        return
    if cell.world.rank == 0:
        first = cell.memory.get(_FIRST_ID)
        _plant(cell, Path(checkpoint_id), Path(first) if first else None)
    cell.world.meet()


def _at_trainee(cell: Cell, place: Place, trainee: Trainee) -> None:
    if not _wanted(cell, place):
        return
    world = cell.world
    site = Site(
        trainee.model,
        trainee.optimizer,
        trainee.scheduler,
        trainee.noise,
        trainee.tensor_object,
        trainee.train_state,
        world.rank,
        world.size,
        world.checkpoint_group,
        cell.memory.get(_FIRST_LEAVES, {}),
    )
    with torch.no_grad():
        _plant(cell, site)


def _wanted(cell: Cell, place: Place) -> bool:
    return cell.config.fault.target is not None and cell.config.fault.at is place


def _plant(cell: Cell, *where: Any) -> None:
    fault = cell.config.fault
    pkgutil.resolve_name(str(fault.target))(*where, **fault.options)
