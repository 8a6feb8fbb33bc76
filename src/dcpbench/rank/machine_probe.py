"""Describe this machine in a separate process: the driver does not import torch, and a process that has
started CUDA cannot be forked."""

import os
import platform
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import psutil

from dcpbench.rank import nccl

_NCCL_ERROR = nccl.load_nccl()  # before torch, which then uses it; agents import this module first

import torch  # noqa: E402


def main(connection: Connection, also: Callable[[], dict[str, Any]]) -> None:
    """Send the entries of `environment.json` that a sweep needs to begin, and those of `also`. Then send the
    rest and exit."""
    gpu_count = torch.cuda.device_count()
    with suppress(BrokenPipeError):  # the driver was interrupted, or has refused its configuration
        connection.send(
            {
                # A TorchVersion would make the driver import torch to unpickle it.
                "torch": str(torch.__version__),
                "python": platform.python_version(),
                "platform": platform.platform(),
                "cpu_cores": len(os.sched_getaffinity(0)),
                "memory_bytes": psutil.virtual_memory().total,
                "gpu_count": gpu_count,
                "cuda": torch.version.cuda,
                "nccl": nccl.version() or ".".join(map(str, torch.cuda.nccl.version()))
                if gpu_count
                else None,
                "nccl_error": _NCCL_ERROR,
                **also(),
            }
        )
        # This starts CUDA, which takes more than a second.
        names = [torch.cuda.get_device_name(index) for index in range(gpu_count)]
        memory = [torch.cuda.get_device_properties(index).total_memory for index in range(gpu_count)]
        connection.send({"gpus": names, "gpu_memory_bytes": memory})
    connection.close()
    os._exit(0)
