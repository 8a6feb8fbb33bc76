"""The same for many items, on all cores, by processes forked from this one."""

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from dcpbench.sweep.signals import leave_to_parent

Item = TypeVar("Item")
Made = TypeVar("Made")

_WORTH_S = 0.5
"""How much work is worth a process."""
_SLOW = 60
"""How many times as long it may take on a machine that has much else to do."""
_MOST_WORKERS = 16


def forked_map(make: Callable[[Item], Made], items: Sequence[Item], each_s: float) -> list[Made]:
    """What `make`, which raises nothing, makes of each item; `each_s` is about how long one takes."""
    global _make
    _make = make
    workers = min(_MOST_WORKERS, len(os.sched_getaffinity(0)), int(len(items) * each_s / _WORTH_S))
    if workers > 1 and threading.active_count() == 1:  # a thread's locks would stay locked in a fork
        with multiprocessing.get_context("fork").Pool(workers, leave_to_parent) as pool:
            ends = time.monotonic() + _SLOW * each_s * len(items)
            pending = pool.imap(_made, items)
            with suppress(multiprocessing.TimeoutError):  # a process was stopped: this one does it all
                return _collected(lambda: pending.next(max(0, ends - time.monotonic())), len(items))
    remaining = iter(items)
    return _collected(lambda: make(next(remaining)), len(items))


def _collected(take: Callable[[], Made], number: int) -> list[Made]:
    made: list[Made] = []
    while len(made) < number:
        made.append(take())
        if told:
            told(len(made), number)
    return made


told: Callable[[int, int], None] | None = None
"""Called with the number of items made so far, and of how many: whoever sets it shows how far it is."""

_make: Callable[[Any], Any]
"""What processes forked from this one do."""


def _made(item: Any) -> Any:
    return _make(item)
