"""A storage that takes longer than it has to, by a known time or share: what a comparison has to find."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemWriter

from dcpbench.checkpointers.storage import Storage, file
from dcpbench.config.groups import SaveConfig, StorageConfig


class WaitingWriter(FileSystemWriter):
    """Has each save take `wait_s` longer, as a storage that is far away would, and then `share` of it all.

    The coordinator alone finishes a checkpoint, and all other ranks wait for it.
    """

    wait_s = 0.0
    share = 0.0
    began = 0.0

    def reset(self, checkpoint_id: Any = None) -> None:
        super().reset(checkpoint_id)
        self.began = time.perf_counter()

    def finish(self, *arguments: Any, **named: Any) -> None:
        super().finish(*arguments, **named)
        time.sleep(self.wait_s)
        time.sleep(self.share * (time.perf_counter() - self.began))


def waiting(folder: Path, config: StorageConfig, save: SaveConfig) -> Storage:
    """`dcpbench.checkpointers.storage.file` with such a writer; `options` are its two times."""
    writer = WaitingWriter(
        folder,
        sync_files=config.sync_files,
        thread_count=config.thread_count,
        cache_staged_state_dict=save.cache_staged_state_dict,
    )
    writer.wait_s, writer.share = config.options["wait_s"], config.options["share"]
    return replace(file(folder, replace(config, options={}), save), writer=writer)
