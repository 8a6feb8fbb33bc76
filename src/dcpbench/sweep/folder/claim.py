"""A sweep's folder: claimed before anything starts, never shared with another sweep or driver."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dcpbench.config.errors import ConfigError
from dcpbench.records import lock
from dcpbench.records.store import ENVIRONMENT_JSON, RESULTS_JSONL, SWEEP_JSON

_KEY = "hydra.sweep.dir"
_BEFORE_A_SWEEP = {lock.LOCK, f"{SWEEP_JSON}.tmp"}
"""What a driver that was killed before it had started a sweep may leave behind."""


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Make the folder and be the only driver in it; a folder in which no sweep has begun is taken back.

    The kernel gives the lock up when the driver ends, however it ends.

    Raises:
        ConfigError: it cannot be made or written to, or another driver is at work there.
    """
    try:
        descriptor = lock.take(folder)
    except BlockingIOError:
        raise ConfigError(f"{_KEY}={folder}: another dcpbench is at work in this folder") from None
    except OSError as error:
        raise ConfigError(f"{_KEY}={folder}: cannot be used: {error.strerror}") from None
    try:
        yield
    finally:
        _take_back(folder)
        os.close(descriptor)


def refuse_used(folder: Path, key: str = _KEY) -> None:
    """Make sure that nothing is in `folder`, which `key` of the configuration asks for; writes nothing.

    Raises:
        ConfigError: it cannot be looked into, or it holds something already.
    """
    try:
        used = {item.name for item in folder.iterdir()} - _BEFORE_A_SWEEP
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"{key}={folder}: cannot be used: {error.strerror}") from None
    if used:
        what = "is not empty; choose a folder that is new or empty"
        if RESULTS_JSONL in used or SWEEP_JSON in used:
            what = "holds another sweep; choose a folder that is new or empty, or go on with resume="
        raise ConfigError(f"{key}={folder}: {what}")


def claim(folder: Path, key: str) -> None:
    """Make an empty folder that `key` of the configuration asks for.

    Raises:
        ConfigError: it cannot be made or written to, or it holds something already.
    """
    refuse_used(folder, key)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{key}={folder}: cannot be used: {error.strerror}") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"{key}={folder}: cannot be written to")


def clear(folder: Path, within: Path) -> None:
    """Remove a folder, if there is one, that lies within another.

    Raises:
        ConfigError: it lies elsewhere, or cannot be removed.
    """
    if within.resolve() not in folder.resolve().parents:
        raise ConfigError(f"{folder}: does not lie in {within}, and is not removed")
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"{folder}: of a cell that broke off, cannot be removed: {error}") from None


def _take_back(folder: Path) -> None:
    if any((folder / name).exists() for name in (SWEEP_JSON, RESULTS_JSONL, ENVIRONMENT_JSON)):
        return
    with suppress(OSError):
        for name in _BEFORE_A_SWEEP:
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()
