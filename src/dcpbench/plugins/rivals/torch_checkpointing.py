"""The package torch_checkpointing, which writes each rank's state in files of its own."""

import time
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.stateful import Stateful

from dcpbench.checkpointers.base import Checkpointer, PendingSave, Ranks, file_lengths
from dcpbench.checkpointers.nested import check_fits, slots, state_dicts
from dcpbench.checkpointers.raw_io import RawIO
from dcpbench.config.schema import Config
from dcpbench.verify.audit import Manifest


class TorchCheckpointingCheckpointer(Checkpointer):
    """Its CheckpointManager, saving before it returns, and loading under the layout that was saved."""

    unreadable = "its files hold DTensors, which only ranks with the mesh of the save can make again"

    def __init__(self, folder: Path, config: Config, ranks: Ranks) -> None:
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.config import SyncCheckpointSaverConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        self._ranks = ranks
        self.raw = RawIO(config.storage.thread_count, sync=False)  # it syncs nothing
        # Its direct I/O, the default, ends in EINVAL (0.1.1) where a file system takes whole blocks alone.
        storage = LocalFileSystemStorageConfig(use_direct_io=False)
        given = CheckpointManager.Config(save=SyncCheckpointSaverConfig(), storage_config=storage)
        self._manager = CheckpointManager(given)

    def save(self, state: dict[str, Any], checkpoint_id: str, slot: int = 0) -> PendingSave:
        started = time.perf_counter()
        if self._ranks.rank == 0 and Path(checkpoint_id).exists():
            self.remove(checkpoint_id)
        self._ranks.meet()
        self._manager.save(checkpoint_id, state_dicts(state))
        self._ranks.meet()
        return PendingSave(started, time.perf_counter())

    @torch.no_grad()
    def load(self, state: dict[str, Any], checkpoint_id: str) -> None:
        """Fill a state with what a checkpoint holds of it.

        Raises:
            RuntimeError: it does not hold all of it.
            ValueError: a tensor has another shape.
        """
        # Into nothing: it refuses an integer where the target has a float, as a weight decay of 0 and of 0.1.
        loaded = self._manager.load(checkpoint_id, into=dict.fromkeys(state), strict=True)
        held = {key: container[last] for container, last, key in slots(loaded)}
        check_fits(held, state_dicts(state))
        for name, one in state.items():
            if isinstance(one, Stateful):
                one.load_state_dict(loaded[name])
                continue
            for container, last, key in slots(one, f"{name}."):
                if isinstance(container[last], torch.Tensor):
                    container[last].copy_(held[key])
                else:
                    container[last] = held[key]

    def manifest(self, checkpoint_id: str) -> Manifest:
        """It says nothing of itself that another process could read."""
        return Manifest({}, {}, file_lengths(checkpoint_id))

    def read_tensor(self, checkpoint_id: str, key: str) -> torch.Tensor | None:
        return None

    def close(self) -> None:
        self._manager.close()
