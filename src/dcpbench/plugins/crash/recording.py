"""Log every change that this process makes to files below a folder, and every point at which it waits for
other ranks.

The file layer does not detect writes by native code. So callers compare the files that result from the record
(`disk_states.after`) with the files on disk, and the tests compare the record with `strace`.
"""

import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from dcpbench.plugins.crash.file_layer import FileLayer, layered, real_open
from dcpbench.plugins.crash.operations import Kind, Record, Step, tree_of


class Recorder(FileLayer):
    """Logs the changes of a process to files below `folder`, as pickled steps in a file in `logs`."""

    def __init__(self, folder: Path, logs: Path, rank: int, role: str = "rank") -> None:
        super().__init__(folder, role)
        self.logs, self.rank = logs, rank
        # Each process has a separate log, because a forked one would write into its parent's.
        self._log = real_open(logs / f"{rank}-{role}-{os.getpid()}.pickle", "wb", buffering=0)
        self._writing = threading.Lock()

    def note(self, kind: Kind, **fields: Any) -> None:
        with self._writing:
            self._log.write(pickle.dumps(Step(kind, time.monotonic_ns(), **fields)))

    def in_child(self) -> tuple[Callable[..., FileLayer], tuple[Any, ...]]:
        return Recorder, (self.folder, self.logs, self.rank, "child")

    def close(self) -> None:
        self._log.close()


@contextmanager
def recording(folder: Path, logs: Path, rank: int) -> Iterator[Recorder]:
    """Context manager: record the changes of this process, and of processes that it spawns, to files below a
    folder. The folder `logs` is outside of it and shared by all ranks."""
    with closing(Recorder(folder, logs, rank)) as recorder, layered(recorder):
        yield recorder


def read_record(before: Path, logs: Path, ranks: int) -> Record:
    """Return the record of these ranks; `before` is a copy of the folder before the save."""
    return Record(tree_of(before), tuple(_steps_of(rank, logs) for rank in range(ranks)))


def _steps_of(rank: int, logs: Path) -> tuple[Step, ...]:
    """Return the steps of the processes of a rank, ordered by time."""
    steps: list[Step] = []
    for log in sorted(logs.glob(f"{rank}-*")):
        with log.open("rb") as file:
            while file.peek(1):
                steps.append(pickle.load(file))  # noqa: S301 - a rank of this cell wrote it
    return tuple(sorted(steps, key=lambda step: step.at_ns))
