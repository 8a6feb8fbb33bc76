"""A storage that is slower by a known share: what a comparison has to find."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemWriter

from dcpbench.checkpoint.storage import Storage, file
from dcpbench.config import SaveConfig, StorageConfig

SHARE = 0.10


class SlowerWriter(FileSystemWriter):
    """Has a save take a tenth longer, from when it begins until its metadata is there.

    The coordinator alone finishes a checkpoint, and all other ranks wait for it.
    """

    began = 0.0

    def reset(self, checkpoint_id: Any = None) -> None:
        super().reset(checkpoint_id)
        self.began = time.perf_counter()

    def finish(self, *arguments: Any) -> None:
        super().finish(*arguments)
        time.sleep(SHARE * (time.perf_counter() - self.began))


def slower(folder: Path, config: StorageConfig, save: SaveConfig) -> Storage:
    """`dcpbench.checkpoint.storage.file` with another writer."""
    writer = SlowerWriter(
        folder,
        sync_files=config.sync_files,
        thread_count=config.thread_count,
        cache_staged_state_dict=save.cache_staged_state_dict,
        **config.options,
    )
    return replace(file(folder, config, save), writer=writer)
