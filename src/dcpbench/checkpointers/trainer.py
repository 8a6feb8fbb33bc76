"""Checkpoints of a user's trainer, written by its `save(path)` and read by its `load(path)`."""

import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from dcpbench.checkpointers.base import Checkpointer, PendingSave, Ranks
from dcpbench.config.schema import Config


class TrainerCheckpointer(Checkpointer):
    """Calls the trainer in the state to save and load, each checkpoint in a separate folder. Only the trainer
    can read its files."""

    unreadable = "only the trainer can read its files"

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


def _path(checkpoint_id: str) -> str:
    """Return the path for the trainer, which does not exist, in a folder that does. All files that the
    trainer creates there, with any suffix, are in the checkpoint's folder."""
    return str(Path(checkpoint_id) / "checkpoint")
