"""One rank as the driver sees it: its process, and what it has said of the running cell."""

import time
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import psutil

from dcpbench.core.stage_end import Failed, RankEnd
from dcpbench.rank.messages import CellSpec, Message, PhaseBegun, UploadsUnderWay

_REPORT_S = 1.0
"""How long after its end a process may be taken for alive."""

_ENDING_S = 30.0
"""How long a process may take to end whose connection is closed: it gives back all of its memory after that,
and its threads end one by one."""

_POLL_S = 0.05


@dataclass
class Rank:
    """A rank: its process, the connection to it, and how the running stage ends there as far as it is known.

    `since` is when its phase began (`time.monotonic`); `dropped` tells of messages that were not about the
    stage.
    """

    process: ForkServerProcess
    connection: Connection
    end: RankEnd
    stage: CellSpec = field(init=False)
    since: float = field(default_factory=time.monotonic)
    dropped: list[str] = field(default_factory=list)

    @property
    def number(self) -> int:
        """Its number in the world."""
        return self.end.rank

    @property
    def log(self) -> Path:
        """What it writes while it runs its stage."""
        return Path(self.stage.folder) / f"rank{self.number}.log"

    def begin(self, stage: CellSpec) -> None:
        """A stage begins; a rank that has yet to join is still at that."""
        self.stage, self.dropped = stage, []
        before = self.end
        self.end = RankEnd(before.rank, before.local_rank, before.host)
        if before.phase != self.end.phase:
            self.end.phase, self.since = "start", time.monotonic()

    def take(self, message: Message) -> bool:
        """Note what it has to say; whether it is about the running stage. What is about another one (of a
        process that a stage before this one had forked, say) is dropped, and reported."""
        content, end = message.content, self.end
        if message.rank != self.number or message.run not in (None, self.stage.run) or not end.waiting:
            of = f"{message.run.cell}, try {message.run.attempt + 1}" if message.run else "no cell"
            what = f"{type(content).__name__} of rank {message.rank}, {of}"
            self.dropped.append(f"rank {self.number}: what came from it was dropped: {what}")
            return False
        if isinstance(content, PhaseBegun):
            end.phase, self.since = content.phase, time.monotonic()
        elif isinstance(content, UploadsUnderWay):
            end.uploads = content.since
        elif isinstance(content, Failed):
            end.failed = content
        else:
            end.report = content
        return True

    def stopped(self) -> bool:
        """Whether a signal has stopped its process."""
        with suppress(psutil.Error):
            status = psutil.Process(self.process.pid).status()
            return status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
        return False

    def wait_ended(self) -> None:
        """Wait until its process has ended, whose connection is closed, and no longer than that may take."""
        deadline = time.monotonic() + _ENDING_S
        while self.process.is_alive() and not self.unreported() and time.monotonic() < deadline:
            self.process.join(_POLL_S)

    def unreported(self) -> bool:
        """Whether its process has ended, and the server that it was forked from does not say so."""
        if not self.process.is_alive() or self._runs():
            return False
        self.process.join(_REPORT_S)
        return self.process.is_alive()

    def _runs(self) -> bool:
        """Whether its process is there, or any thread of it: its main thread may be the first to end."""
        with suppress(psutil.Error):
            process = psutil.Process(self.process.pid)
            return process.status() != psutil.STATUS_ZOMBIE or process.num_threads() > 1
        return False
