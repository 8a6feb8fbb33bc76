"""The same for many items, on all cores, by processes forked from this one."""

import multiprocessing
import os
import threading
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
            pending = pool.map_async(_made, items, chunksize=4)
            with suppress(multiprocessing.TimeoutError):  # a process was stopped: this one does it all
                return pending.get(_SLOW * each_s * len(items))
    return [make(item) for item in items]


_make: Callable[[Any], Any]
"""What processes forked from this one do."""


def _made(item: Any) -> Any:
    return _make(item)
