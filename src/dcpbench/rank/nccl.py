"""Load the NCCL that DCPBENCH_NCCL names before torch is imported, and get the version of NCCL. Neither
starts CUDA."""

import ctypes
import os

NCCL_PATH = "DCPBENCH_NCCL"
"""The environment variable with the path of a libnccl to load instead of torch's."""

_NAME = "libnccl.so.2"


def load_nccl() -> str | None:
    """Load the library that DCPBENCH_NCCL names, if any. torch uses it if imported afterwards.

    Returns:
        an error message, or None.
    """
    if not (path := os.environ.get(NCCL_PATH)):
        return None
    try:
        ctypes.CDLL(path)
    except OSError as error:
        return f"nccl={path}: {str(error).removeprefix(f'{path}: ')}"
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
