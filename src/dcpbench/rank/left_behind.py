"""Detect what a stage of a cell leaked into its rank's process, where it could affect the next cell.

A rank's fingerprint is taken after it has joined its peers. Random generators and settings that
`dcpbench.rank.run_cell` resets before each stage are not checked; nor are functions, since ranks that ran a
user's code are used for no other cell.
"""

import gc
import os
import resource
import signal
import sys
import threading
import warnings
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch import overrides
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers
from torch.utils import _python_dispatch

from dcpbench.checkpointers.dcp import kept_by_dcp
from dcpbench.verify.process_state import open_descriptors, process_flags, settled

_COMPILER_VARIABLES = ("TORCHINDUCTOR_", "TRITON_")
"""Prefixes of environment variables that the compiler sets."""

_LIBRARY_THREADS = ("tqdm_monitor", "fsspecIO", "asyncio_0")
"""Threads that are started once: by the compiler's first progress bar, and by fsspec's first client."""

_RECURSION = 1000
"""Python's default limit; the compiler raises it, which does no harm."""


class Fingerprint:
    """The state of this process; `left_behind` reports what has changed since."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._settings = _settings(device)
        self._resources = _resources()
        self._groups = _process_groups()

    def left_behind(self) -> list[str]:
        """Return a sentence for each changed setting, missing process group, and kind of resource (threads,
        processes, open files) that has grown, after a wait for them to end."""
        now = _settings(self._device)
        changed = [
            f"{name}: {_short(self._settings.get(name))} is now {_short(now.get(name))}"
            for name in {**self._settings, **now}
            if now.get(name) != self._settings.get(name)
        ]
        changed += [
            f"process group {name} was destroyed" for name in sorted(self._groups - _process_groups())
        ]
        added = settled(self._added)
        return changed + [f"{name} leaked: {', '.join(sorted(more))}" for name, more in added.items()]

    def _added(self) -> dict[str, set[str]]:
        return {name: more for name, now in _resources().items() if (more := now - self._resources[name])}


def _settings(device: torch.device) -> dict[str, object]:
    """Return the settings of this process by name."""
    flags = {name: value for name, value in process_flags(device).items() if "deterministic" not in name}
    hooks = {
        f"{space.__name__}.{name}": len(value)
        for space in (modules, optimizers)
        for name, value in vars(space).items()
        if name.startswith("_global_") and isinstance(value, dict)
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
        **flags,
        **hooks,
        **limits,
        **handlers,
        "torch function modes": overrides._len_torch_function_stack(),
        "dispatch modes": _python_dispatch._len_torch_dispatch_stack(),
        "torch threads": torch.get_num_threads(),
        "folder": folder,
        "umask": umask,
        **{
            f"${name}": value
            for name, value in os.environ.items()
            if not name.lstrip("_").startswith(_COMPILER_VARIABLES)
        },
        "sys.path": tuple(sys.path),
        "streams": (id(sys.stdout), id(sys.stderr), id(sys.excepthook), id(threading.excepthook)),
        "recursion limit": min(sys.getrecursionlimit(), _RECURSION),
        "garbage collection": (gc.isenabled(), gc.get_threshold(), len(gc.callbacks)),
        "tracing": (sys.gettrace(), sys.getprofile()),
        "objects kept by DCP": tuple(kept_by_dcp()),
        "warning filters that raise": sum(entry[0] == "error" for entry in warnings.filters),
    }


def _resources() -> dict[str, set[str]]:
    """Return identifiers of threads, processes and open files. Sockets and pipes are not counted, because
    process groups of a mesh are kept for the next cell with the same mesh."""
    threads = {
        f"{thread.name} ({thread.native_id})"
        for thread in threading.enumerate()
        if thread.name not in _LIBRARY_THREADS
    }
    children = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):
            children |= set((task / "children").read_text().split())
    descriptors = open_descriptors().items()
    opened = {f"{number} ({name})" for number, name in descriptors if number > 2 and name.startswith("/")}
    return {"threads": threads, "processes": children, "open files": opened}


def _process_groups() -> set[str]:
    return set(dist.distributed_c10d._world.pg_names.values()) if dist.is_initialized() else set()


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]} …"
