"""The standard streams of a command, which can be missing, full or closed."""

import os
import sys
from contextlib import suppress
from typing import Any, TextIO


def open_standard_streams() -> None:
    """Open descriptors 0, 1 and 2 if the process was started without them, before another file, such as a
    pipe to a rank, gets one of these numbers."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            with suppress(OSError):
                os.fstat(number)
                continue
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


class SafeStream:
    """A text stream to which writes never fail, even if it is full, closed or broken."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
