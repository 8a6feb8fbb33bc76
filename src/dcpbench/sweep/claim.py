"""Claim folders for a sweep: one driver works in a folder at a time, and none in that of another sweep.

A folder that cannot be used is refused by a ConfigError with the key of the configuration that names it.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dcpbench.config.errors import ConfigError
from dcpbench.records import files
from dcpbench.records.store import RESULTS_JSONL, SWEEP_JSON
from dcpbench.sweep.manifest import DIR

LOCK = ".lock"


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Context manager: make the folder and hold its lock. A folder in which no sweep has begun is removed.

    The kernel releases the lock when the driver ends, however it ends.
    """
    with _refusing(folder):
        descriptor = lock(folder)
    try:
        yield
    finally:
        with suppress(OSError):
            if not _used(folder):
                files.remove(folder, within=folder.parent)
        os.close(descriptor)


def claim(folder: Path, key: str) -> None:
    """Make an empty folder, which `key` of the configuration names."""
    refuse_used(folder, key)
    with _refusing(folder, key):
        folder.mkdir(parents=True, exist_ok=True)


def refuse_used(folder: Path, key: str = DIR) -> None:
    """Refuse a folder, which `key` of the configuration names, that is not empty; write nothing."""
    used: set[str] = set()
    with _refusing(folder, key), suppress(FileNotFoundError):
        used = _used(folder)
    if used:
        what = "is not empty; choose a folder that is new or empty"
        if RESULTS_JSONL in used or SWEEP_JSON in used:
            what = f"contains a sweep already; choose a new or empty folder, or run dcpbench resume {folder}"
        raise ConfigError(f"{key}={folder}: {what}")


def refuse_unusable(folder: Path, key: str = DIR, begun: bool = False) -> None:
    """Refuse a folder in which no sweep can begin, or be resumed if it has `begun`; write nothing."""
    if not begun:
        refuse_used(folder, key)
    with _refusing(folder, key):
        if (folder / LOCK).exists():
            os.close(lock(folder))
        place = next(path for path in (folder, *folder.parents) if path.exists())
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise ConfigError(f"{key}={folder}: cannot be used: {place} cannot be written to")


def lock(folder: Path) -> int:
    """Make the folder if it is missing, and lock it; close the returned descriptor to release it. Processes
    that are started later do not inherit it.

    Raises:
        BlockingIOError: another process has locked it.
        OSError: the folder cannot be made or written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.fstat(descriptor).st_nlink:
            raise BlockingIOError("its last holder is removing the folder")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@contextmanager
def _refusing(folder: Path, key: str = DIR) -> Iterator[None]:
    """Context manager: refuse a folder, which `key` of the configuration names, if it cannot be used."""
    try:
        yield
    except BlockingIOError:
        raise ConfigError(f"{DIR}={folder}: another dcpbench is using this folder") from None
    except OSError as error:
        raise ConfigError(f"{key}={folder}: cannot be used: {error.strerror}") from None


def _used(folder: Path) -> set[str]:
    """Return the names in a folder, without those that a driver killed before its sweep began can leave."""
    names = {item.name for item in folder.iterdir()}
    return {name for name in names if name != LOCK and not files.is_temporary(name)}
