"""A checkpointer that does what another one does, and plants a fault on the way."""

import copy
import pkgutil
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.stateful import Stateful

from dcpbench.checkpointers.base import Checkpointer, PendingSave, Ranks
from dcpbench.config.groups import FaultConfig, Place
from dcpbench.faults.targets import StagedState, Target
from dcpbench.verify.audit import Manifest


class FaultyCheckpointer(Checkpointer):
    """Plants a fault in every save or load of a training run: in what is staged, in the live state right
    after the save, in the complete checkpoint's files, or in what was loaded. What holds no model is no
    training run, and left alone."""

    def __init__(self, inner: Checkpointer, fault: FaultConfig, ranks: Ranks) -> None:
        self._inner = inner
        self._at = fault.at
        self._plant = torch.no_grad()(partial(pkgutil.resolve_name(str(fault.target)), **fault.options))
        self._ranks = ranks
        self._first_id: str | None = None
        self._first_staged: dict[str, Any] | None = None
        self.raw = inner.raw

    def save(self, state: dict[str, Any], checkpoint_id: str, slot: int = 0) -> PendingSave:
        if "model" not in state:
            return self._inner.save(state, checkpoint_id, slot)
        saved = self._staged(state) if self._at is Place.staged else state
        pending = self._inner.save(saved, checkpoint_id, slot)
        self._first_id = self._first_id or checkpoint_id
        if self._at is Place.live:
            self._plant(Target(state, self._ranks, self._from_first(checkpoint_id)))
        if self._at is Place.written:
            pending.when_complete = partial(self._damage_files, checkpoint_id)
        return pending

    def load(self, state: dict[str, Any], checkpoint_id: str) -> None:
        self._inner.load(state, checkpoint_id)
        if self._at is Place.restored and "model" in state:
            self._plant(Target(state, self._ranks, self._from_first(checkpoint_id)))

    def manifest(self, checkpoint_id: str) -> Manifest:
        return self._inner.manifest(checkpoint_id)

    def read_tensor(self, checkpoint_id: str, key: str) -> torch.Tensor | None:
        return self._inner.read_tensor(checkpoint_id, key)

    def size(self, checkpoint_id: str) -> int:
        return self._inner.size(checkpoint_id)

    def remove(self, checkpoint_id: str) -> None:
        self._inner.remove(checkpoint_id)

    def unwrapped(self) -> Checkpointer:
        return self._inner.unwrapped()

    def _staged(self, state: dict[str, Any]) -> dict[str, Any]:
        copied = {
            name: copy.deepcopy(each.state_dict() if isinstance(each, Stateful) else each)
            for name, each in state.items()
        }
        if self._first_staged is None:
            self._first_staged = copy.deepcopy(copied)
        self._plant(StagedState(copied, self._first_staged))
        return copied

    def _damage_files(self, checkpoint_id: str) -> None:
        """On rank 0, before any rank goes on."""
        if self._ranks.rank == 0:
            self._plant(Path(checkpoint_id), Path(self._first_id or checkpoint_id))
        self._ranks.meet()

    def _from_first(self, checkpoint_id: str) -> "partial[torch.Tensor | None]":
        """Reads tensors of the first checkpoint: of a cell's later stage, the first that lies there."""
        beside = [str(path) for path in Path(checkpoint_id).parent.iterdir() if path.is_dir()]
        return partial(self._inner.read_tensor, self._first_id or min(beside))
