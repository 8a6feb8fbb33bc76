"""Signals that ask a sweep to end: Ctrl-C, what schedulers send, a terminal that is closed."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


@dataclass
class Signals:
    """The first one is raised in the main thread as `KeyboardInterrupt`, unless the sweep is ending already;
    the others change nothing. `received` is its number."""

    received: int | None = None
    _holds: bool = False

    def obey(self) -> None:
        """From now on raise it. What this process was started to ignore (`nohup`) it goes on ignoring."""
        for number in _ENDING:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._take)

    def hold(self) -> None:
        """From now on only note it: rows are put in order and reports written, which takes seconds."""
        self._holds = True

    def status(self, otherwise: int) -> int:
        """The exit status that a shell expects of a process which such a signal has ended."""
        return otherwise if self.received is None else 128 + self.received

    def _take(self, number: int, _: FrameType | None) -> None:
        if self.received is None:
            self.received = number
            if not self._holds:
                raise KeyboardInterrupt(signal.Signals(number).name)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """In the main thread: what is begun in here is ended before such a signal is obeyed."""
    came: list[tuple[int, FrameType | None]] = []
    handlers = {number: signal.getsignal(number) for number in _ENDING}
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
