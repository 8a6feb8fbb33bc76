"""Inject the fault of a cell into the saves and loads of its checkpointer, or into the training of its
runs."""

import copy
import pkgutil
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.stateful import Stateful

from dcpbench.cell.cell import Cell
from dcpbench.checkpointers.base import Checkpointer, PendingSave, Ranks
from dcpbench.config.groups import FaultConfig, InjectedAt, rank_of
from dcpbench.plugins.faults.expected import NothingToInjectError
from dcpbench.plugins.faults.targets import Target
from dcpbench.plugins.faults.wrong_training import WrongTraining
from dcpbench.runs.run import Run


class FaultInjector:
    """Replaces `save` and `load` of a checkpointer, and injects a fault: into the staged state, the live
    state right after the save, the files of the complete checkpoint, or the loaded state. A state without a
    model is not damaged."""

    def __init__(self, checkpointer: Checkpointer, fault: FaultConfig, ranks: Ranks) -> None:
        self._save, self._load, self._checkpointer = checkpointer.save, checkpointer.load, checkpointer
        self._fault, self._ranks = fault, ranks
        self._damage = torch.no_grad()(partial(pkgutil.resolve_name(str(fault.target)), **fault.options))
        self._first: Path | None = None
        self._kept: dict[str, Any] = {}
        vars(checkpointer).update(save=self.save, load=self.load)
        if fault.at is InjectedAt.written:  # other ranks report success before rank 0 has damaged the files
            vars(checkpointer).update(listing=lambda *_, **__: {})

    def save(self, state: dict[str, Any], checkpoint_id: str, slot: int = 0) -> PendingSave:
        if "model" not in state:
            return self._save(state, checkpoint_id, slot)
        self._first = self._first or Path(checkpoint_id)
        self._kept.setdefault("saved", state)
        if self._fault.at in (InjectedAt.staged, InjectedAt.both):
            state = {
                name: copy.deepcopy(holder.state_dict() if isinstance(holder, Stateful) else holder)
                for name, holder in state.items()
            }
            self._inject(state, Path(checkpoint_id))
        pending = self._save(state, checkpoint_id, slot)
        if self._fault.at is InjectedAt.live:
            self._inject(state, Path(checkpoint_id))
        if self._fault.at is InjectedAt.written:
            damaged = pending.then(partial(self._damage_files, checkpoint_id))
            pending.when_complete = partial(self._wait_for_damage, damaged)
        return pending

    def load(self, state: dict[str, Any], checkpoint_id: str) -> None:
        self._load(state, checkpoint_id)
        model = state.get("model")
        is_probe = isinstance(model, dict) and len(model) == 1  # whether a key can be loaded at all
        if self._fault.at in (InjectedAt.restored, InjectedAt.both) and model is not None and not is_probe:
            self._inject(state, Path(checkpoint_id))

    def _damage_files(self, checkpoint_id: str) -> None:
        """Damage the files on rank 0, before the checkpoint is reported as complete."""
        if self._ranks.rank != 0:
            return
        with ExitStack() as opened:
            folders = {
                path: opened.enter_context(self._checkpointer.files(path))
                for path in {str(self._first), checkpoint_id}
            }
            if not folders[checkpoint_id].is_dir():
                raise NothingToInjectError("the checkpoint has no files")
            self._inject({}, folders[checkpoint_id], folders[str(self._first)])
            if objects := self._checkpointer.objects:
                objects.put_back(checkpoint_id, folders[checkpoint_id])

    def _wait_for_damage(self, damaged: Future[None]) -> None:
        """Make every rank wait until the files are damaged."""
        damaged.result()
        self._ranks.meet()

    def _inject(self, state: dict[str, Any], folder: Path, first: Path | None = None) -> None:
        first = first or self._first or min(folder.parent.iterdir(), key=lambda path: path.stat().st_mtime)
        if _is_on_rank(self._fault, self._ranks):
            self._damage(Target(state, self._ranks, folder, first, self._checkpointer, self._kept))


def inject_in_saves(cell: Cell, checkpointer: Checkpointer) -> None:
    """Make a checkpointer inject the fault of its cell, if the cell has one."""
    if cell.config.fault.target:
        FaultInjector(checkpointer, cell.config.fault, cell.world)


def inject_in_training(cell: Cell, run: Run) -> None:
    """Make the training of a run wrong if the cell has a fault of training on this rank."""
    fault = cell.config.fault
    if fault.at is InjectedAt.training and _is_on_rank(fault, run.world):
        pkgutil.resolve_name(str(fault.target))(WrongTraining(run), **fault.options)


def _is_on_rank(fault: FaultConfig, ranks: Ranks) -> bool:
    return fault.rank is None or ranks.rank == rank_of(fault.rank, ranks.size)
