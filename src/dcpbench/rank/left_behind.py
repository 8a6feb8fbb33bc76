"""Whether a stage of a cell leaves its rank as it was born: what the next cell could notice of it.

A fingerprint is taken once, when the rank has joined its peers; functions are noted when this module is
imported, by the server that ranks are forked from, which is once for all of them. Generators are not in it,
nor what each cell sets itself (`dcpbench.rank.run_cell`): those are set again before each stage.
"""

import gc
import os
import resource
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import overrides
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers
from torch.utils import _python_dispatch

from dcpbench.checkpointers.dcp import kept_by_dcp
from dcpbench.verify.process_state import open_descriptors, process_flags, settled

_PATCHABLE = (
    *("dcpbench", "torch._tensor", "torch.amp", "torch.autograd", "torch.distributed", "torch.functional"),
    *("torch.nn", "torch.optim", "torch.random", "torch.serialization", "torch.utils.checkpoint"),
)
"""Packages and modules whose functions a cell uses; their functions and methods are looked at."""

_OWN_VARIABLES = ("TORCHINDUCTOR_", "TRITON_")
"""What the compiler sets in the environment."""

_OWN_THREADS = ("tqdm_monitor", "fsspecIO", "asyncio_0")
"""What is started once: by the compiler with its first bar of progress, by fsspec with its first client."""

_RECURSION = 1000
"""Python's own limit; the compiler raises it, which nobody notices."""

_KINDS = (FunctionType, staticmethod, classmethod, property)


@dataclass(frozen=True)
class _Function:
    """A function where it stands: in the namespace of a module or a class, under a name."""

    namespace: Mapping[str, Any]
    where: str
    name: str
    value: object
    code: object

    def is_another(self) -> bool:
        """Whether another one stands there, or it does something else."""
        now = self.namespace.get(self.name)
        now = _unwrapped(now) if type(now) in _KINDS else now
        return now is not self.value or getattr(now, "__code__", None) is not self.code


class Fingerprint:
    """What a process is like now; `left_behind` tells what has changed since."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._settings = _settings(device)
        self._counts = _counts()
        self._groups = _process_groups()

    def left_behind(self) -> list[str]:
        """What is not as it was, in words: settings, functions, process groups, and more threads, processes
        or open files than there were, once they have settled."""
        now = _settings(self._device)
        changed = [
            f"{name}: {_short(self._settings.get(name))} is now {_short(now.get(name))}"
            for name in {**self._settings, **now}
            if now.get(name) != self._settings.get(name)
        ]
        changed += [f"{each.where}.{each.name} is another" for each in _BORN_WITH if each.is_another()]
        changed += [f"process group {name} is gone" for name in sorted(self._groups - _process_groups())]
        grown = settled(self._grown)
        return changed + [
            f"{name}: {', '.join(sorted(more))} more than before" for name, more in grown.items()
        ]

    def _grown(self) -> dict[str, set[str]]:
        return {name: more for name, now in _counts().items() if (more := now - self._counts[name])}


def _settings(device: torch.device) -> dict[str, object]:
    """What is set for the whole process, by name."""
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
        "threads of torch": torch.get_num_threads(),
        "folder": folder,
        "umask": umask,
        **{
            f"${name}": it
            for name, it in os.environ.items()
            if not name.lstrip("_").startswith(_OWN_VARIABLES)
        },
        "sys.path": tuple(sys.path),
        "streams": (id(sys.stdout), id(sys.stderr), id(sys.excepthook), id(threading.excepthook)),
        "recursion limit": min(sys.getrecursionlimit(), _RECURSION),
        "garbage collection": (gc.isenabled(), gc.get_threshold(), len(gc.callbacks)),
        "tracing": (sys.gettrace(), sys.getprofile()),
        "kept by DCP": tuple(kept_by_dcp()),
        "warnings that raise": sum(entry[0] == "error" for entry in warnings.filters),
    }


def _counts() -> dict[str, set[str]]:
    """Threads, processes and open files, each by what tells it from others. Sockets and pipes are not
    counted: process groups of a mesh stay, for the next cell with such a mesh."""
    threads = {
        f"{one.name} ({one.native_id})" for one in threading.enumerate() if one.name not in _OWN_THREADS
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


def _functions() -> Iterator[_Function]:
    """The functions and methods of the modules that are imported now."""
    seen: set[int] = set()
    for name, module in list(sys.modules.items()):
        if module is None or not any(name == one or name.startswith(f"{one}.") for one in _PATCHABLE):
            continue
        for owner, where in [(module, name), *_classes(module, name)]:
            if id(owner) in seen:
                continue
            seen.add(id(owner))
            for attribute, value in list(vars(owner).items()):
                if type(value) in _KINDS:  # what only poses as one may do something when it is asked
                    value = _unwrapped(value)
                    code = getattr(value, "__code__", None)
                    yield _Function(vars(owner), where, attribute, value, code)


def _unwrapped(value: Any) -> Any:
    """The function itself where torch has marked it as one not to be compiled, or, once an optimizer of its
    class was built, as one that calls hooks."""
    value = getattr(value, "_torchdynamo_orig_callable", value)
    return value.__wrapped__ if getattr(value, "hooked", False) else value


def _classes(module: ModuleType, name: str) -> list[tuple[type, str]]:
    own = [one for one in vars(module).values() if issubclass(type(one), type) and one.__module__ == name]
    return [(one, f"{name}.{one.__name__}") for one in own]


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]} …"


_BORN_WITH = tuple(_functions())
