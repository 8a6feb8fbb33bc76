"""Read values that training can depend on and no state dict has: plain attributes of modules, and globals of
the user's own Python modules. They name likely causes, and fail no check."""

import fnmatch
import functools
import hashlib
import itertools
import pickle
import sys
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from dcpbench.code.provenance import owner_of
from dcpbench.state.snapshot import local_part, plain_fqn
from dcpbench.torch_private import BUFFERS, CHILDREN, NON_PERSISTENT, ORIGINAL_MODULE
from dcpbench.workloads.generators import KINDS, state_of_generator

_PLAIN = (bool, int, float, complex, str, bytes, range, type(None), itertools.count)
_MOST_VALUES, _MOST_ITEMS, _DEEPEST, _SHOWN = 10_000, 1_000, 4, 60
"""How many values are read, of how many items, how deep they are nested, and how many characters are kept."""
_OF_EACH_MODULE = {*vars(nn.Module()), "named_parameters"}
_MAIN = ("__main__", "__mp_main__")
_WRAPPERS = (DistributedDataParallel, FullyShardedDataParallel)


class UnsavedValues:
    """Plain values as short texts, by their names with dots.

    Attributes:
        texts: the values.
        unreadable: the types of what may have a position that cannot be read: iterators, data loaders, ....
    """

    def __init__(self, modules: Mapping[str, nn.Module], not_saved: Iterable[str] = ()) -> None:
        """Read these modules of a user's, and, if there are any, the globals of the user's Python modules; no
        values that a user has listed as `not_saved`, by names or patterns."""
        self.texts: dict[str, str] = {}
        self.unreadable: dict[str, str] = {}
        self._read = {id(parameter) for root in modules.values() for parameter in root.parameters()}
        for name, root in modules.items():
            for prefix, submodule in root.named_modules():
                if not isinstance(submodule, _WRAPPERS) and ORIGINAL_MODULE.name not in CHILDREN.of(
                    submodule
                ):
                    path = f"{name}.{plain_fqn(root, prefix)}".rstrip(".")
                    self._read_all(_attributes(submodule), path)
        for name, module in [*sys.modules.items()] if modules else ():
            if isinstance(module, ModuleType) and is_user_module(name):
                self._read_all(vars(module), name)
        for name in (f"{prefix}{pattern}" for pattern in not_saved for prefix in ("", "model.")):
            for matching in {*fnmatch.filter(self.texts, name), *fnmatch.filter(self.texts, f"{name}.*")}:
                del self.texts[matching]

    def _read_all(self, values: Mapping[Any, Any], path: str, depth: int = 0) -> None:
        for key, value in itertools.islice([*values.items()], _MOST_ITEMS):
            if not str(key).startswith("__") and len(self.texts) < _MOST_VALUES:
                with suppress(Exception):  # it can be an object of the user's that does anything
                    self._read_value(value, f"{path}.{key}", depth, path)

    def _read_value(self, value: Any, name: str, depth: int, path: str) -> None:
        if isinstance(value, torch.Tensor):
            if id(value) in self._read:
                return
            value = local_part(value)
            if not value.untyped_storage().nbytes():  # FSDP frees the weights that it has gathered
                return
        if isinstance(value, torch.Tensor | np.ndarray | np.generic):
            value = value.tolist() if np.prod(value.shape) <= _MOST_ITEMS else type(value)
        if isinstance(value, KINDS):
            self.texts[name] = f"state {_digest(pickle.dumps(state_of_generator(value)))}"
        elif isinstance(value, set | frozenset):
            self.texts[name] = _shortened(f"set{sorted(map(repr, value))}")
        elif _is_plain(value):
            self.texts[name] = _shortened(repr(value))
        elif isinstance(value, type | FunctionType):
            if value.__module__ == path:  # where it was written
                self._read_all(vars(value), name, depth + 1)
        elif id(value) in self._read or depth > _DEEPEST or isinstance(value, nn.Module | ModuleType):
            return
        elif isinstance(value, dict):
            self._read_all(value, name, depth + 1)
        elif isinstance(value, list | tuple | deque):
            self._read_all(dict(enumerate(value)), name, depth + 1)
        elif is_user_module(type(value).__module__):
            self._read.add(id(value))
            self._read_all(getattr(value, "__dict__", {}), name, depth + 1)
        elif hasattr(type(value), "__iter__") and not hasattr(type(value), "__getitem__"):
            self.unreadable[name] = type(value).__name__


NOTHING_UNSAVED = UnsavedValues({})


@functools.cache
def is_user_module(module: str) -> bool:
    """Return whether a Python module is a user's; not the one that a process was started with."""
    file = str(getattr(sys.modules.get(module), "__file__", None))
    # The file of `torch.ops` is "_ops.py".
    return module not in _MAIN and Path(file).is_absolute() and owner_of(file) == "user"


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module, and its buffers that are not saved."""
    named = {key: value for key, value in vars(module).items() if key not in _OF_EACH_MODULE}
    return named | {key: BUFFERS.of(module)[key] for key in NON_PERSISTENT.of(module)}


def _is_plain(value: Any) -> bool:
    several = isinstance(value, list | tuple | deque) and len(value) <= _MOST_ITEMS
    return isinstance(value, _PLAIN) or (several and all(map(_is_plain, value)))


def _shortened(text: str) -> str:
    """Return a text; of a long one its start and a digest."""
    more = f"... (digest {_digest(text.encode())})" if len(text) > _SHOWN else ""
    return text[:_SHOWN] + more


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:8]
