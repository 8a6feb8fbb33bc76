"""What this machine offers, asked in a process of its own: the driver has no torch, and whoever
touches CUDA cannot be forked from afterwards."""

import os
import platform
from multiprocessing.connection import Connection
from typing import Any

import psutil
import torch


def main(connection: Connection) -> None:
    """Send the description and end."""
    connection.send(describe())
    connection.close()
    os._exit(0)


def describe() -> dict[str, Any]:
    """The machine and its software, as it goes into `environment.json`."""
    gpus = torch.cuda.device_count()
    cuda = gpus > 0
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": [torch.cuda.get_device_name(index) for index in range(gpus)],
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
    }
