"""Shared memory that somebody still has open is not taken for a dead rank's."""

import multiprocessing
from multiprocessing import shared_memory

from dcpbench.executors import cleanup


def test_what_another_process_holds_stays() -> None:
    """The C library maps a semaphore under another name than the one that it has."""
    lock = multiprocessing.get_context("spawn").Lock()
    segment = shared_memory.SharedMemory(create=True, size=1)
    made = {segment.name, f"sem.{lock._semlock.name.removeprefix('/')}"}  # type: ignore[attr-defined]
    try:
        assert made <= cleanup.shared_memory()
        cleanup.remove_shared_memory(made, set(), 0.0)
        assert made <= cleanup.shared_memory()
    finally:
        segment.close()
        segment.unlink()
