"""The lock of a sweep's folder: one driver works in it at a time."""

import fcntl
import os
from pathlib import Path

LOCK = ".lock"


def take(folder: Path) -> int:
    """Make the folder if it is not there, and have its lock; closing the descriptor gives it up, and so does
    the kernel when the process ends, however it ends. What is started later does not inherit it.

    Raises:
        BlockingIOError: another process has it.
        OSError: the folder cannot be made or written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.fstat(lock).st_nlink:
            raise BlockingIOError("its last holder takes the folder back")
    except BaseException:
        os.close(lock)
        raise
    return lock


def is_held(folder: Path) -> bool:
    """Whether another process is at work in a folder; makes nothing there.

    Raises:
        OSError: its lock cannot be opened.
    """
    try:
        if (folder / LOCK).exists():
            os.close(take(folder))
    except BlockingIOError:
        return True
    return False
