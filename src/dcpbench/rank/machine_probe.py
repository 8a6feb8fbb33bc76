"""What this machine offers, asked in a process of its own: the driver has no torch, and whoever
touches CUDA cannot be forked from afterwards."""

import os
import platform
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import psutil

from dcpbench.rank import nccl

_NCCL_ERROR = nccl.load()  # before torch, which then uses it

import torch  # noqa: E402


def main(connection: Connection, also: Callable[[], dict[str, Any]]) -> None:
    """Send what a sweep must know to begin, as it goes into `environment.json`, with what `also` returns;
    then the rest, and end."""
    gpu_count = torch.cuda.device_count()
    connection.send(
        {
            # Its own class of string would have the driver import torch to receive it.
            "torch": str(torch.__version__),
            "python": platform.python_version(),
            "platform": platform.platform(),
            "cpu_cores": len(os.sched_getaffinity(0)),
            "memory_bytes": psutil.virtual_memory().total,
            "gpu_count": gpu_count,
            "cuda": torch.version.cuda,
            "nccl": nccl.version() or _built_in() if gpu_count else None,
            "nccl_error": _NCCL_ERROR,
            **also(),
        }
    )
    # This starts CUDA, which takes more than a second.
    connection.send(
        {
            "gpus": [torch.cuda.get_device_name(index) for index in range(gpu_count)],
            "gpu_memory_bytes": [
                torch.cuda.get_device_properties(index).total_memory for index in range(gpu_count)
            ],
        }
    )
    connection.close()
    os._exit(0)


def _built_in() -> str:
    """Return the version of an NCCL that is part of torch's own library."""
    return ".".join(map(str, torch.cuda.nccl.version()))
