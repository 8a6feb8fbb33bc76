"""What a trainer of a user's own does itself: its `save(path)` and `load(path)`."""

import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from dcpbench.checkpointers.base import Checkpointer, PendingSave, Ranks, file_lengths
from dcpbench.config.schema import Config
from dcpbench.verify.audit import Manifest


class TrainerCheckpointer(Checkpointer):
    """Has the trainer in the state save and load itself, each checkpoint in a folder of its own. What lies
    there the trainer alone can read."""

    unreadable = "only the trainer knows what its files hold, and how they are read"

    def __init__(self, folder: Path, config: Config, ranks: Ranks) -> None:
        self._ranks = ranks

    def save(self, state: dict[str, Any], checkpoint_id: str, slot: int = 0) -> PendingSave:
        Path(checkpoint_id).mkdir(parents=True, exist_ok=True)
        started = time.perf_counter()
        returned = state["trainer"].save(_path(checkpoint_id))
        upload = returned if isinstance(returned, Future) else None
        if upload is None:
            self._ranks.meet()
        return PendingSave(started, time.perf_counter(), upload)

    def load(self, state: dict[str, Any], checkpoint_id: str) -> None:
        state["trainer"].load(_path(checkpoint_id))

    def manifest(self, checkpoint_id: str) -> Manifest:
        """It says nothing of itself."""
        return Manifest({}, {}, file_lengths(checkpoint_id))

    def read_tensor(self, checkpoint_id: str, key: str) -> torch.Tensor | None:
        return None


def _path(checkpoint_id: str) -> str:
    """What a trainer is given: a path where nothing is, in a folder that is there. Whether it makes a file or
    a folder of it, with or without an ending, all that it writes lies in the checkpoint's folder."""
    return str(Path(checkpoint_id) / "checkpoint")
