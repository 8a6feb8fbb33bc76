"""A storage that is slower by a known share: what a comparison has to find."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemWriter
from torch.futures import Future

from dcpbench.checkpoint.storage import Storage, file
from dcpbench.config import SaveConfig, StorageConfig

SHARE = 0.10


class SlowerWriter(FileSystemWriter):
    """Waits, after its files are written, for a tenth of the time that they took."""

    def write_data(self, *arguments: Any) -> Future[Any]:
        started = time.perf_counter()
        written = super().write_data(*arguments)
        written.wait()
        time.sleep(SHARE * (time.perf_counter() - started))
        return written


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
