"""A storage that lies: what is read of one tensor has another lowest bit than what was written."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader

from dcpbench.checkpointers.base import PendingSave
from dcpbench.checkpointers.dcp import asynchronous
from dcpbench.checkpointers.storage import Storage, file
from dcpbench.config.groups import SaveConfig, StorageConfig


class LyingReader(FileSystemReader):
    """Flips the lowest bit of the first element of each part that it reads of `fqn`."""

    def __init__(self, path: str, fqn: str) -> None:
        super().__init__(path)
        self.fqn = fqn

    def read_data(self, plan: Any, planner: Any) -> Any:
        done = super().read_data(plan, planner)
        done.wait()
        for item in plan.items:
            if item.storage_index.fqn == self.fqn:
                with torch.no_grad():
                    part = planner.resolve_tensor(item)
                    part.view(torch.int32)[(0,) * part.ndim] ^= 1
        return done


def lying(folder: Path, config: StorageConfig, save: SaveConfig) -> Storage:
    """`file`, but a bit of `options.fqn` comes back flipped."""
    options = dict(config.options)
    fqn = options.pop("fqn")
    honest = file(folder, replace(config, options=options), save)
    return replace(honest, reader=lambda checkpoint_id: LyingReader(checkpoint_id, fqn))


def first_save_only(state_dict: dict[str, Any], checkpoint_id: str, **given: Any) -> PendingSave:
    """`asynchronous`, but it refuses where there is a checkpoint already, as a stager of torch 2.11 does."""
    if any(Path(checkpoint_id).parent.glob("*/.metadata")):
        raise RuntimeError("one save only")
    return asynchronous(state_dict, checkpoint_id=checkpoint_id, **given)


def careless(folder: Path, config: StorageConfig, save: SaveConfig) -> Storage:
    """`file`, but it always overwrites."""
    return file(folder, replace(config, options={**config.options, "overwrite": True}), save)
