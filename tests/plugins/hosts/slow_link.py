"""A link between two network namespaces that carries each packet late, and loses some.

    python slow_link.py NAMESPACE NAMESPACE INTERFACE DELAY_S LOSS

Each end is a TUN device, so that this needs no `netem` in the kernel. It prints a line once both ends are
there, and runs until its standard input ends, as it does when the process that has started it ends.
"""

import ctypes
import fcntl
import heapq
import itertools
import os
import random
import selectors
import struct
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TextIO

_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000
_MOST_BYTES = 65536


def _end(namespace: str, interface: str) -> int:
    """The packets that leave a namespace by this interface, which is made there. This process returns."""
    with Path("/proc/self/ns/net").open() as here, Path("/var/run/netns", namespace).open() as place:
        _enter(place)
        end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH22x", interface.encode(), _IFF_TUN | _IFF_NO_PI))
        _enter(here)
    return end


def _enter(place: TextIO) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(place.fileno(), _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"namespace {place.name}")


def main(one: str, other: str, interface: str, delay_s: float, loss: float) -> None:
    ends = _end(one, interface), _end(other, interface)
    opposite = dict(zip(ends, reversed(ends), strict=True))
    number = itertools.count()  # packets that are due together stay in order
    late: list[tuple[float, int, int, bytes]] = []
    chance = random.Random(0)
    with selectors.DefaultSelector() as ready:
        for source in (0, *ends):
            ready.register(source, selectors.EVENT_READ)
        print("up", flush=True)
        while True:
            wait_s = max(0.0, late[0][0] - time.monotonic()) if late else None
            for key, _ in ready.select(wait_s):
                if key.fd == 0:
                    return
                with suppress(BlockingIOError):
                    while packet := os.read(key.fd, _MOST_BYTES):
                        if chance.random() >= loss:
                            due = time.monotonic() + delay_s
                            heapq.heappush(late, (due, next(number), opposite[key.fd], packet))
            while late and late[0][0] <= time.monotonic():
                *_, end, packet = heapq.heappop(late)
                with suppress(OSError):  # that end is down
                    os.write(end, packet)


if __name__ == "__main__":
    main(*sys.argv[1:4], *map(float, sys.argv[4:]))
