"""A FileSystemWriter with several threads, one of which cannot write.

python writer_threads.py
"""

import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

threading.excepthook = lambda raised: print(f"    a thread ended with {raised.exc_value!r}")


class Unwritable:
    """What no file can hold, as a disk without room has no place for it."""

    def __reduce__(self) -> Any:
        raise OSError("no space left on device")


def saved(threads: int) -> int:
    """Save a tensor and what cannot be written; whether that was reported as success."""
    state = {"weight": torch.ones(4), "value": Unwritable()}
    print(f"  thread_count={threads}")
    with tempfile.TemporaryDirectory() as folder:
        writer = FileSystemWriter(folder, single_file_per_rank=False, thread_count=threads)
        try:
            dcp.save(state, storage_writer=writer, no_dist=True)
        except dcp.CheckpointException as error:
            (cause,) = error.failures.values()
            print(f"    the save raises {type(cause[0]).__name__}: {cause[0]}")
            return 0
        names = sorted(FileSystemReader(folder).read_metadata().state_dict_metadata)
        stored = sorted(key.fqn for key in FileSystemReader(folder).read_metadata().storage_data)
        files = sorted(path.name for path in Path(folder).iterdir())
        print(f"    the save reported success: files {files}")
        print(f"    keys of its metadata {names}, keys that have a place in a file {stored}")
        return 1


print(f"torch {torch.__version__}")
sys.exit(saved(threads=1) + saved(threads=4))
