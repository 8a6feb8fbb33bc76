"""State of the process, as opposed to the training run: neither a save nor a load may change it, and nothing
of a cell may be left in it for the next one."""

import gc
import os
import resource
import signal
import socket
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import SavePlanner
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers

from dcpbench.state.snapshot import Leaves, retained, snapshot_nested
from dcpbench.torch_private import (
    CACHED_PLANS,
    DISPATCH_MODES,
    FUNCTION_MODES,
    GLOBAL_HOOKS,
    PROCESS_GROUPS,
    UPLOADER,
)

_PRECISIONS = ("cuda.matmul", "cudnn.conv", "cudnn.rnn", "mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn")
"""Operations of `torch.backends` that have an `fp32_precision`; that of a backend applies to its
operations."""

_SETTLE_S = 2.0
"""Time for threads that have finished to exit and close their files."""

_COMPILER_VARIABLES = ("TORCHINDUCTOR_", "TRITON_")
"""Prefixes of environment variables that the compiler sets."""

_LIBRARY_THREADS = ("tqdm_monitor", "fsspecIO", "asyncio_0")
"""Threads that are started once: by the compiler's first progress bar, and by fsspec's first client."""

_RECURSION = 1000
"""Python's default limit; the compiler raises it, which does no harm."""

_REPLACEABLE = ("threads", "descriptors")
"""Resources of which another one in place of an earlier one is no addition."""

Resources = dict[str, Counter[str]]
"""What this process has, by kind: `threads`, `processes`, `open_files`, `descriptors`, `groups`."""


class ProcessState(NamedTuple):
    """What a save, a load or a cell could change in this process. Its random generators are a state of the
    run; its functions are left out, since ranks that ran a user's code are used for no other cell."""

    settings: Mapping[str, object]
    resources: Resources

    @classmethod
    def now(cls, device: torch.device | None = None) -> "ProcessState":
        """Return the present state; without a device only the resources."""
        return cls(_settings(device) if device else {}, _resources())

    def minus(self, before: "ProcessState") -> "ProcessState":
        """Return the settings that differ from an earlier state, and the resources added since."""
        now, then = self.settings, before.settings
        changed = {name: now.get(name) for name in {**then, **now} if now.get(name) != then.get(name)}
        added: Resources = {}
        for kind, names in self.resources.items():
            earlier = before.resources[kind]
            is_more = kind not in _REPLACEABLE or names.total() > earlier.total()
            if is_more and (more := names - earlier):
                added[kind] = more
        return ProcessState(changed, added)

    def left_open(self, kinds: Iterable[str], below: str = "") -> dict[str, list[str]]:
        """Return the names of these kinds of resources that were added since this state, after waiting
        for them to end; of files, those whose path begins with `below`."""

        def added() -> dict[str, list[str]]:
            more = ProcessState.now().minus(self).resources
            names = {kind: sorted(more[kind].elements()) for kind in kinds if kind in more}
            if "open_files" in names:
                names["open_files"] = [name for name in names["open_files"] if name.startswith(below)]
            return {kind: some for kind, some in names.items() if some}

        return wait_until_empty(added)

    @staticmethod
    def leaves(generators: Mapping[str, torch.Tensor], device: torch.device) -> Leaves:
        """Return these states of random generators, and settings that results depend on."""
        return retained(snapshot_nested({"generator": generators, "process": process_flags(device)}))


def _settings(device: torch.device) -> dict[str, object]:
    hooks = {
        f"{space.__name__}.{name}": len(hooks_by_id)
        for space in (modules, optimizers)
        for name, hooks_by_id in vars(space).items()
        if name.startswith(GLOBAL_HOOKS) and isinstance(hooks_by_id, dict)
    }
    limits = {
        name: resource.getrlimit(getattr(resource, name))
        for name in dir(resource)
        if name.startswith("RLIMIT_")
    }
    handlers = {str(number): signal.getsignal(number) for number in signal.valid_signals()}
    try:
        folder = str(Path.cwd())
    except OSError:
        folder = "removed"
    umask = os.umask(0)
    os.umask(umask)
    return {
        **process_flags(device),
        **hooks,
        **limits,
        **handlers,
        "torch function modes": FUNCTION_MODES.value(),
        "dispatch modes": DISPATCH_MODES.value(),
        "torch threads": torch.get_num_threads(),
        "folder": folder,
        "umask": umask,
        **{
            f"${name}": setting
            for name, setting in os.environ.items()
            if not name.lstrip("_").startswith(_COMPILER_VARIABLES)
        },
        "sys.path": tuple(sys.path),
        "streams": (id(sys.stdout), id(sys.stderr), id(sys.excepthook), id(threading.excepthook)),
        "recursion limit": min(sys.getrecursionlimit(), _RECURSION),
        "garbage collection": (gc.isenabled(), gc.get_threshold(), len(gc.callbacks)),
        "tracing": (sys.gettrace(), sys.getprofile()),
        "objects kept by DCP": tuple(kept_by_dcp()),
        "warning filters that raise": sum(
            warning_filter[0] == "error" for warning_filter in warnings.filters
        ),
    }


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
    return ", ".join(
        f"{name} {'ieee' if precision == 'none' else precision}" for name, precision in kinds.items()
    )


def kept_by_dcp() -> dict[str, Any]:
    """Return, by name, what DCP keeps globally between saves, if anything: cached plans, and the process that
    uploads."""
    cached = {
        name: plans for name, plans in vars(SavePlanner).items() if name.startswith(CACHED_PLANS) and plans
    }
    process = UPLOADER.value
    return cached if process is None else {**cached, UPLOADER.name: process}


def _resources() -> Resources:
    """Return what this process has, by kind. Connections to a port of this process are not counted: any
    process on the host can open one, and those of ranks are counted at their other end."""
    threads = {
        f"{thread.name} ({thread.native_id})"
        for thread in threading.enumerate()
        if thread.name not in _LIBRARY_THREADS
    }
    children = set[str]()
    for task in os.listdir("/proc/self/task"):  # noqa: PTH208 - called often, and this is faster
        with suppress(OSError), open(f"/proc/self/task/{task}/children", "rb") as listed:  # noqa: PTH123
            children |= set(listed.read().decode().split())
    descriptors = open_descriptors()
    counted = descriptors.keys() - _accepted(descriptors)
    groups = PROCESS_GROUPS.value.pg_names.values() if dist.is_initialized() else ()
    return {
        "threads": Counter(threads),
        "processes": Counter(children),
        "open_files": Counter(
            [name for number, name in descriptors.items() if number > 2 and name[0] == "/"]
        ),
        "descriptors": Counter([descriptors[number] for number in counted]),
        "groups": Counter(groups),
    }


def _accepted(descriptors: Mapping[int, str]) -> set[int]:
    """Return the descriptors of connections to a port on which this process listens.

    Each socket is asked: the kernel's tables list the sockets of every process, and grow with the host.
    """
    listening, ports = set[int](), dict[int, int]()
    for number in [number for number, name in descriptors.items() if name[:7] == "socket:"]:
        with suppress(OSError):  # closed by now, or of a family without addresses
            connection = socket.socket(fileno=number)
            try:
                if (
                    connection.family in (socket.AF_INET, socket.AF_INET6)
                    and connection.type == socket.SOCK_STREAM
                ):
                    ports[number] = connection.getsockname()[1]
                    if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        listening.add(number)
            finally:
                connection.detach()  # the descriptor is its owner's, and stays open
    heard = {ports[number] for number in listening}
    return {number for number, port in ports.items() if port in heard} - listening


def open_descriptors() -> dict[int, str]:
    """Return the target of each descriptor of this process: a path, or `socket:[number]`."""
    opened = {}
    for number in os.listdir("/proc/self/fd"):  # noqa: PTH208 - called often, and this is faster
        try:
            opened[int(number)] = os.readlink(f"/proc/self/fd/{number}")  # noqa: PTH115
        except OSError:
            continue  # closed by now, like the descriptor of the listing
    return opened


def wait_until_empty(grown: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the result of `grown` as soon as it is empty, or after a time limit."""
    until = time.monotonic() + _SETTLE_S
    while (left := grown()) and time.monotonic() <= until:
        gc.collect()
        time.sleep(0.01)
    return left
