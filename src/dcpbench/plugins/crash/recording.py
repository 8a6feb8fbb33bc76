"""Every change that this process makes to files below a folder, and every point at which it waits for other
ranks, as a line of a log.

What native code writes the file layer does not see: whoever records holds what the record makes of the files
before against the files after (`disk_states.after`), and the tests hold it against `strace`.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dcpbench.plugins.crash.file_layer import FileLayer, layered, real_open
from dcpbench.plugins.crash.operations import Kind, Record, Step, read_logs, to_line, tree_of


class Recorder(FileLayer):
    """Writes the log of a process below `logs`, of changes below `folder`."""

    def __init__(self, folder: Path, logs: Path, rank: int, role: str = "rank") -> None:
        super().__init__(folder, role)
        self.logs, self.rank = logs, rank
        # A process that was forked would write among what its parent writes: each has a log of its own.
        self._log = real_open(logs / f"{rank}-{role}-{os.getpid()}.jsonl", "w", buffering=1)
        self._writing = threading.Lock()

    def note(self, kind: Kind, **fields: Any) -> None:
        with self._writing:
            self._log.write(to_line(Step(kind, time.monotonic_ns(), **fields)) + "\n")

    def in_child(self) -> tuple[Callable[..., FileLayer], tuple[Any, ...]]:
        return Recorder, (self.folder, self.logs, self.rank, "child")

    def succeeded(self) -> None:
        """The save has reported success to this rank."""
        self.note(Kind.success)

    def close(self) -> None:
        self._log.close()


@contextmanager
def recording(folder: Path, logs: Path, rank: int) -> Iterator[Recorder]:
    """Meanwhile this process, and processes that it spawns, record what they do to the files below a folder;
    `logs` is a folder elsewhere, for all ranks."""
    recorder = Recorder(folder, logs, rank)
    with layered(recorder):
        try:
            yield recorder
        finally:
            recorder.close()


def read_record(before: Path, logs: Path, ranks: int) -> Record:
    """What these ranks have recorded, of a folder that was like `before`."""
    of_ranks = (read_logs(sorted(logs.glob(f"{rank}-*.jsonl"))) for rank in range(ranks))
    return Record(tree_of(before), tuple(of_ranks))
