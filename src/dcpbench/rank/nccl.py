"""The NCCL of this process: loaded from DCPBENCH_NCCL before torch is imported, and asked for its version.
Neither starts CUDA."""

import ctypes
import os

NCCL_PATH = "DCPBENCH_NCCL"
"""The variable that names a libnccl to be loaded instead of the one that torch brings."""

_NAME = "libnccl.so.2"


def load() -> str | None:
    """Load the library that DCPBENCH_NCCL names, if any: torch, imported after it, then uses that one.

    Returns:
        why it cannot be loaded, or None.
    """
    if not (path := os.environ.get(NCCL_PATH)):
        return None
    try:
        ctypes.CDLL(path)
    except OSError as error:
        return f"nccl={path}: {error}"
    return None if version() else f"nccl={path}: is not a {_NAME}"


def version() -> str | None:
    """Return the version of the loaded NCCL, such as `2.30.7`; None if none is loaded."""
    number = ctypes.c_int()
    try:
        library = ctypes.CDLL(_NAME, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        library.ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return None
    return f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"
