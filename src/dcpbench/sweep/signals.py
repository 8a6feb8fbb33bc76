"""The signals that end a sweep, and when they are obeyed."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals that ask a sweep to end: Ctrl-C, what schedulers send, a terminal that is closed."""


@dataclass
class Signals:
    """The first of `ENDING_SIGNALS` raises `KeyboardInterrupt` in the main thread, unless the sweep is ending
    already; later ones change nothing. `received` is the number of the first."""

    received: int | None = None
    _is_ending: bool = False

    def obey(self) -> None:
        """Raise from now on. Signals that this process was started to ignore (`nohup`) stay ignored."""
        for number in ENDING_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._take)

    def hold(self) -> None:
        """Only note signals from now on: rows are put in order and reports written, which takes seconds."""
        self._is_ending = True

    def status(self, otherwise: int) -> int:
        """Return the exit status that a shell expects of a process ended by this signal."""
        return otherwise if self.received is None else 128 + self.received

    def _take(self, number: int, _: FrameType | None) -> None:
        if self.received is None:
            self.received = number
            if not self._is_ending:
                self.check()

    def check(self) -> None:
        """Raise if a signal was received: Hydra takes some exceptions for an answer."""
        if self.received is not None:
            raise KeyboardInterrupt(signal.Signals(self.received).name)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Context manager, in the main thread: signals that come within it are obeyed after it."""
    came: list[tuple[int, FrameType | None]] = []
    handlers = {number: signal.getsignal(number) for number in ENDING_SIGNALS}
    obeyed = {number: handler for number, handler in handlers.items() if callable(handler)}
    try:
        for number in obeyed:
            signal.signal(number, lambda *taken: came.append(taken))
        yield
    finally:
        for number, handler in obeyed.items():
            signal.signal(number, handler)
        for taken, frame in came:
            obeyed[signal.Signals(taken)](taken, frame)


def interrupted(folder: Path | None = None) -> str:
    """Return the last line of a sweep in this folder that was interrupted before it began."""
    written = "" if folder and folder.exists() else "; nothing was written"
    return f"dcpbench: interrupted before a cell was run{written}\n"
