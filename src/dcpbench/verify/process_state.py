"""State of the process, as opposed to the training run, which neither a save nor a load is allowed to
change."""

import gc
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from dcpbench.core.rank_report import Compared
from dcpbench.verify.perturb import compare_controlled
from dcpbench.verify.snapshot import Leaf, Leaves, retained, snapshot_nested

_PRECISIONS = ("cuda.matmul", "cudnn.conv", "cudnn.rnn", "mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn")
"""Operations of `torch.backends` that have an `fp32_precision`; that of a backend applies to its
operations."""

_SETTLE_S = 2.0
"""Time for threads that have finished to exit and close their files."""


def snapshot_process(generators: Mapping[str, torch.Tensor], device: torch.device) -> Leaves:
    """Return these states of random generators, determinism, gradient mode, default dtype and device."""
    return retained(snapshot_nested({"generator": generators, "process": process_flags(device)}))


def process_flags(device: torch.device) -> dict[str, bool | str]:
    """Return determinism, precision, gradient mode, default dtype and device, by name."""
    return {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "deterministic_warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "float32_precision": _float32_precision(),
        "grad_mode": torch.is_grad_enabled(),
        "inference_mode": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled(device.type),
        "default_dtype": str(torch.get_default_dtype()),
        "default_device": str(torch.get_default_device()),
    }


def _float32_precision() -> str:
    """Return the precision of each kind of operation on float32.

    torch's older functions, which get and set one precision for all kinds, raise after `fp32_precision` was
    set for one kind. Settings made with them are visible here too.
    """
    kinds = {name: attrgetter(name)(torch.backends).fp32_precision for name in _PRECISIONS}
    return ", ".join(f"{name} {'ieee' if value == 'none' else value}" for name, value in kinds.items())


def snapshot_open(folder: Path, counts: bool) -> Leaves:
    """Return the open files below `folder` and, with `counts`, the numbers of threads and descriptors.

    Connections to a port of this process are not counted: any process on the host can open one, and those of
    ranks are counted at their other end.
    """
    inside, descriptors = f"{folder.resolve()}{os.sep}", open_descriptors()
    names = sorted(name for name in descriptors.values() if name.startswith(inside))
    files: Leaves = {"process.open_files": names}
    if not counts:
        return files
    own = len(descriptors.keys() - _accepted(descriptors))
    return files | {"process.threads": threading.active_count(), "process.descriptors": own}


def _accepted(descriptors: Mapping[int, str]) -> set[int]:
    """Return the descriptors of connections to a port on which this process listens.

    Each socket is asked: the kernel's tables list the sockets of every process, and grow with the host.
    """
    listening, ports = set[int](), dict[int, int]()
    for number in (number for number, name in descriptors.items() if name.startswith("socket:")):
        with suppress(OSError):  # closed by now, or of a family without addresses
            one = socket.socket(fileno=number)
            try:
                if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
                    ports[number] = one.getsockname()[1]
                    if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        listening.add(number)
            finally:
                one.detach()  # the descriptor is its owner's, and stays open
    heard = {ports[number] for number in listening}
    return {number for number, port in ports.items() if port in heard} - listening


def open_descriptors() -> dict[int, str]:
    """Return the target of each descriptor of this process: a path, or `socket:[number]`."""
    opened = {}
    for number in os.listdir("/proc/self/fd"):  # noqa: PTH208 - called often, and this is faster
        with suppress(OSError):  # closed by now, like the descriptor of the listing
            opened[int(number)] = os.readlink(f"/proc/self/fd/{number}")  # noqa: PTH115
    return opened


def left_open(folder: Path, before: Leaves) -> Leaves:
    """Return what `snapshot_open` returned `before` as it is now, after waiting for files to be closed; a
    smaller number, and files that have been closed, count as unchanged."""

    def grown() -> Leaves:
        now = snapshot_open(folder, counts=len(before) > 1)
        return {name: leaf for name, leaf in now.items() if _has_grown(leaf, before[name])}

    return {**before, **settled(grown)}


def _has_grown(now: Leaf, then: Leaf) -> bool:
    return bool(Counter(now) - Counter(then)) if isinstance(now, list) else now > then


def watched(folder: Path, counts: bool) -> Callable[[], Compared]:
    """Note what is open, see `snapshot_open`. Return a function that compares it with what is still open,
    after waiting for it to be closed."""
    before = snapshot_open(folder, counts)
    return lambda: compare_controlled(before, left_open(folder, before))


def settled(grown: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the result of `grown` as soon as it is empty, or after a time limit."""
    until = time.monotonic() + _SETTLE_S
    while (found := grown()) and time.monotonic() <= until:
        gc.collect()
        time.sleep(0.01)
    return found
