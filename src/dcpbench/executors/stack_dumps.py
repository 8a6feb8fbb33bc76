"""Find where ranks hang: every thread's stack goes to the rank's log, and one frame to the row."""

import re
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from dcpbench.executors.rank_handle import Rank
from dcpbench.records import files

_WRITTEN_S = 2.0
_TAIL_LINES = 30
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x.*most recent call first.*$", re.MULTILINE)
_WAITING = ("threading.py", "queue.py", "concurrent/futures/_base.py", "concurrent/futures/thread.py")
"""Files of the innermost frame of a thread that waits for another one."""


def dump(ranks: Sequence[Rank]) -> dict[int, str]:
    """Let each rank that runs write its threads' stacks to its log.

    Returns:
        the innermost frame by rank: `at all_reduce (distributed/distributed_c10d.py:3104)`.
    """
    running = [rank for rank in ranks if rank.process.is_alive()]
    before = {rank.number: _size(rank.log) for rank in running}
    stopped = {rank.number for rank in running if rank.stopped()}
    for rank in running:
        with suppress(psutil.NoSuchProcess):  # it can exit at this moment
            process = psutil.Process(rank.process.pid)
            process.send_signal(signal.SIGUSR1)
            process.resume()  # a stopped process does not handle signals
    _wait_until_written(running, before)
    doing: dict[int, str] = {}
    for rank in running:
        frame = _doing(_text(rank.log, before[rank.number]))
        parts = ("stopped by a signal" if rank.number in stopped else "", f"at {frame}" if frame else "")
        if any(parts):
            doing[rank.number] = " ".join(filter(None, parts))
    return doing


def fatal(log: Path) -> str | None:
    """Return the frame in which the interpreter died, as after a segmentation fault."""
    _, died, dumped = _text(log, -(2**20)).rpartition("Fatal Python error: ")
    frame = _FRAME.search(dumped.partition("Current thread")[2])
    return _short(frame.groups()) if died and frame else None


def tail(log: Path) -> list[str]:
    """Return the last lines of a log."""
    return _text(log, -(2**14)).splitlines()[-_TAIL_LINES:]


def _wait_until_written(running: Sequence[Rank], before: dict[int, int]) -> None:
    """Wait until the logs have grown and no longer do, because faulthandler does not mark the end."""
    sizes: dict[int, int] = {}
    deadline = time.monotonic() + _WRITTEN_S
    while time.monotonic() < deadline:
        time.sleep(0.05)
        now = {rank.number: _size(rank.log) for rank in running}
        if now == sizes and all(now[number] > size for number, size in before.items()):
            return
        sizes = now


def _doing(dumped: str) -> str | None:
    """Return the frame of the main thread, which is dumped last, or of the thread that it waits for."""
    threads = [_FRAME.findall(block) for block in _THREAD.split(dumped)[1:]]
    innermost = [frames[0] for frames in threads if frames]
    if not innermost:
        return None
    *others, main = innermost
    busy = [frame for frame in others if not frame[0].endswith(_WAITING)]
    return _short(busy[0] if busy and main[0].endswith(_WAITING) else main)


def _short(frame: Sequence[str]) -> str:
    path, line, function = frame
    return f"{function} ({'/'.join(Path(path).parts[-2:])}:{line})"


def _text(log: Path, start: int) -> str:
    """Return the text of a log from a byte; a negative one counts from the end."""
    try:
        with files.open_regular(log) as file:
            file.seek(start if start >= 0 else max(0, _size(log) + start))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
