"""One rank as the driver sees it: its process, and what it has said of the running cell."""

import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import psutil

from dcpbench.core.rank_report import RankReport
from dcpbench.worker.messages import CellSpec, Failed, Message, PhaseBegun, UploadsUnderWay

_REPORT_S = 1.0
"""How long after its end a process may be taken for alive."""

_ENDING_S = 30.0
"""How long a process may take to end whose connection is closed: it gives back all of its memory after that,
and its threads end one by one."""

_POLL_S = 0.05


@dataclass
class Rank:
    """A rank; times are `time.monotonic`.

    `since` is when its phase began, `uploads` when each save began that goes on in the background,
    `gone_at` when its process was seen to have ended.
    """

    number: int
    process: ForkServerProcess
    connection: Connection
    stage: CellSpec = field(init=False)
    phase: str = "join"
    since: float = field(default_factory=time.monotonic)
    uploads: tuple[float, ...] = ()
    report: RankReport | None = None
    failed: Failed | None = None
    gone_at: float | None = None
    dropped: list[str] = field(default_factory=list)

    @property
    def waiting(self) -> bool:
        """Whether it has yet to say how the cell ended."""
        return self.report is None and self.failed is None and self.gone_at is None

    @property
    def log(self) -> Path:
        """What it writes while it runs its stage."""
        return Path(self.stage.folder) / f"rank{self.number}.log"

    def begin(self, stage: CellSpec) -> None:
        """A stage begins; a rank that has yet to join is still at that."""
        self.stage = stage
        self.report = self.failed = None
        self.uploads = ()
        self.dropped = []
        if self.phase != "join":
            self.phase, self.since = "start", time.monotonic()

    def take(self, message: Message) -> bool:
        """Note what it has to say; whether it is about the running stage. What is about another one (of a
        process that a stage before this one had forked, say) is dropped, and told."""
        content = message.content
        if message.rank != self.number or message.run not in (None, self.stage.run) or not self.waiting:
            of = f"{message.run.cell}, try {message.run.attempt + 1}" if message.run else "no cell"
            what = f"{type(content).__name__} of rank {message.rank}, {of}"
            self.dropped.append(f"rank {self.number}: what came from it was dropped: {what}")
            return False
        if isinstance(content, PhaseBegun):
            self.phase, self.since = content.phase, time.monotonic()
        elif isinstance(content, UploadsUnderWay):
            self.uploads = content.since
        elif isinstance(content, Failed):
            self.failed = content
        else:
            self.report = content
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

    def ending(self) -> str:
        """How its process ended, in words."""
        code = self.process.exitcode
        if code is None:
            return "was lost"
        if code == 255:  # what multiprocessing takes for it if the server died that would have told it
            return "exited with status 255, or was lost with the server that it was forked from,"
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"exited with status {code}"

    def is_at(self, phase: str) -> bool:
        """Whether a phase goes on, also beside another one."""
        return phase == self.phase or (phase == "upload" and bool(self.uploads))

    def where(self) -> str:
        """Its phase, and what went on beside it."""
        beside = ", an upload under way" if self.uploads and self.phase != "upload" else ""
        return f"{self.phase}{beside}"
