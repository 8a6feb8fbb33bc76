"""How DCP is called to save: one function for each way.

Each takes the state dict, the checkpoint id, the storage writer and the process group to coordinate
in, and returns once training may go on.
"""

import time
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import StorageWriter
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

from dcpbench.checkpointers.base import PendingSave


def sync(
    state_dict: dict[str, Any],
    checkpoint_id: str,
    writer: StorageWriter,
    process_group: dist.ProcessGroup | None,
) -> PendingSave:
    """`dcp.save`: when it returns, the checkpoint is complete."""
    started = time.perf_counter()
    dcp.save(
        state_dict,
        checkpoint_id=checkpoint_id,
        storage_writer=writer,
        process_group=process_group,
    )
    ended = time.perf_counter()
    return PendingSave(started, ended, completed=ended)


def asynchronous(
    state_dict: dict[str, Any],
    checkpoint_id: str,
    writer: StorageWriter,
    process_group: dist.ProcessGroup | None,
) -> PendingSave:
    """`dcp.async_save`: it returns once the state is staged, the upload goes on in a thread.

    `process_group` must be a group of its own with a CPU backend: the upload's collectives run beside
    the training's, and on a shared group the ranks would pair them up differently.
    """
    started = time.perf_counter()
    response = dcp.async_save(
        state_dict,
        checkpoint_id=checkpoint_id,
        storage_writer=writer,
        process_group=process_group,
    )
    if isinstance(response, AsyncSaveResponse):
        # Where staging is asynchronous too, the state must not change before it is staged.
        response.staging_completion.result()
        upload = response.upload_completion
    else:
        upload = response
    return PendingSave(started, time.perf_counter()).follow(upload, time.perf_counter)
