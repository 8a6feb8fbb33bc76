"""Choose the backend and the environment of ranks that share GPUs because there are fewer GPUs than ranks."""

import os

from dcpbench.rank.nccl import NCCL_PATH

LEAST_NCCL = (2, 30)
"""The first NCCL that lets ranks share a GPU."""

_SMALL_BUFFERS = {"NCCL_BUFFSIZE": "262144", "NCCL_MAX_CTAS": "8"}
"""These settings reduce NCCL's memory to a third."""
_BYTES_WITH_SMALL_BUFFERS, _BYTES_BY_DEFAULT = 1_800_000_000, 4_700_000_000
"""Measured for each of 4 and 8 ranks on an H100 and an H200."""
_ENVIRONMENT = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", **_SMALL_BUFFERS}


def ranks_per_gpu(ranks: int, gpus: int) -> int:
    """Return how many neighboring ranks share a GPU; the last group can be smaller."""
    return -(-ranks // gpus)


def nccl_can_share(version: str | None) -> bool:
    """Return whether NCCL of a version, such as `2.30.7`, lets ranks share a GPU."""
    return version is not None and tuple(map(int, version.split(".")[:2])) >= LEAST_NCCL


def environment() -> dict[str, str]:
    """Return the variables that NCCL needs if ranks share a GPU, without those that the user has set."""
    return {name: value for name, value in _ENVIRONMENT.items() if name not in os.environ}


def rank_bytes() -> int:
    """Return the memory that CUDA and NCCL use for a rank that shares a GPU, before any tensor exists."""
    return _BYTES_BY_DEFAULT if _SMALL_BUFFERS.keys() & os.environ.keys() else _BYTES_WITH_SMALL_BUFFERS


def how_to_get(cuda: str | None) -> str:
    """Return how to install an NCCL that lets ranks share a GPU, for torch with this version of CUDA."""
    package = f"nvidia-nccl-cu{(cuda or '13').partition('.')[0]}"
    least = ".".join(map(str, LEAST_NCCL))
    library = f"nccl=DIR/nvidia/nccl/lib/libnccl.so.2 or {NCCL_PATH}"
    return f"pip install --target DIR '{package}>={least}', and pass {library}"
