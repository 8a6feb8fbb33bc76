"""The package torch_checkpointing, which writes the state of each rank to separate files."""

import time
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.stateful import Stateful

from dcpbench.checkpointers.base import Checkpointer, PendingSave, Ranks
from dcpbench.checkpointers.raw_io import RawIO
from dcpbench.config.schema import Config
from dcpbench.core.state import text_of
from dcpbench.state.nested import check_fits, state_dicts
from dcpbench.state.snapshot import flattened, leaf_slots


class TorchCheckpointingCheckpointer(Checkpointer):
    """Its CheckpointManager, with synchronous saves, and loads under the layout of the save."""

    unreadable = "its files contain DTensors, which only ranks with the mesh of the save can rebuild"

    def __init__(self, folder: Path, config: Config, ranks: Ranks) -> None:
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.config import SyncCheckpointSaverConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        self._ranks = ranks
        self.raw = RawIO(config.storage.thread_count, sync=False)  # it never syncs
        # Its default, direct I/O, raises EINVAL (0.1.1) on file systems that accept only full blocks.
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
        """Fill a state from a checkpoint.

        Raises:
            RuntimeError: the checkpoint lacks some of it.
            ValueError: a tensor has another shape.
        """
        # Load into an empty target: it refuses an integer for a float, such as a weight decay of 0 for 0.1.
        loaded = self._manager.load(checkpoint_id, into=dict.fromkeys(state), strict=True)
        leaves = flattened(loaded)
        check_fits(leaves, state_dicts(state))
        for name, holder in state.items():
            if isinstance(holder, Stateful):
                holder.load_state_dict(loaded[name])
                continue
            for container, last, path in leaf_slots(holder, (name,)):
                if isinstance(container[last], torch.Tensor):
                    container[last].copy_(leaves[text_of(path)])
                else:
                    container[last] = leaves[text_of(path)]

    def close(self) -> None:
        self._manager.close()
