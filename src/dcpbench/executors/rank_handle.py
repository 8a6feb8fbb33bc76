"""A rank as the driver observes it: its process, and its messages about the running stage."""

import time
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import psutil

from dcpbench.core.stage_end import Failed, RankEnd
from dcpbench.executors.agent import Forked
from dcpbench.rank.messages import CellSpec, Message, PhaseBegun, UploadsInFlight

_REPORT_S = 1.0
"""Time limit for the agent to report the end of a process."""

_ENDING_S = 30.0
"""Time limit for a process to exit after its connection was closed: it releases its memory and ends its
threads after that."""

_POLL_S = 0.05


@dataclass
class Rank:
    """A rank: its process, the connection to it, and the reports about the end of the running stage there.

    `since` is when its phase began (`time.monotonic`). `dropped` has a sentence for each message about
    another stage.
    """

    process: Forked
    connection: Connection
    end: RankEnd
    stage: CellSpec = field(init=False)
    since: float = field(default_factory=time.monotonic)
    dropped: list[str] = field(default_factory=list)

    @property
    def number(self) -> int:
        """Number in the world."""
        return self.end.rank

    @property
    def log(self) -> Path:
        """Log of the running stage."""
        return Path(self.stage.folder) / f"rank{self.number}.log"

    def begin(self, stage: CellSpec) -> None:
        """Begin a stage. A rank that has not joined its peers remains in phase `join`."""
        self.stage, self.dropped = stage, []
        before = self.end
        self.end = RankEnd(before.rank, before.local_rank, before.host)
        if before.phase != self.end.phase:
            self.end.phase, self.since = "start", time.monotonic()

    def take(self, message: Message) -> bool:
        """Record a message and return True. Drop it and return False if it is about another stage: a process
        that an earlier stage forked can send one."""
        content, end = message.content, self.end
        if message.rank != self.number or message.run not in (None, self.stage.run) or not end.waiting:
            stage = message.run.cell if message.run else "no cell"
            sender = f"{type(content).__name__} of rank {message.rank}, {stage}"
            self.dropped.append(f"rank {self.number}: dropped a message of another stage: {sender}")
            return False
        if isinstance(content, PhaseBegun):
            end.phase, self.since = content.phase, time.monotonic()
        elif isinstance(content, UploadsInFlight):
            end.uploads = content.since
        elif isinstance(content, Failed):
            end.failed = content
        else:
            end.report = content
        return True

    def stopped(self) -> bool:
        """Return whether a signal has stopped its process."""
        with suppress(psutil.Error):
            status = psutil.Process(self.process.pid).status()
            return status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
        return False

    def wait_ended(self) -> None:
        """Wait until its process has exited after closing the connection, up to a limit."""
        deadline = time.monotonic() + _ENDING_S
        while self.process.is_alive() and not self.unreported() and time.monotonic() < deadline:
            self.process.wait(_POLL_S)

    def unreported(self) -> bool:
        """Return whether its process has exited, but its agent does not report that."""
        if not self.process.is_alive() or self._runs():
            return False
        self.process.wait(_REPORT_S)
        return self.process.is_alive()

    def _runs(self) -> bool:
        """Return whether any thread of its process runs: the main thread can be the first to end."""
        with suppress(psutil.Error):
            process = psutil.Process(self.process.pid)
            return process.status() != psutil.STATUS_ZOMBIE or process.num_threads() > 1
        return False
