"""Which files below the watched folder were changed and read, and what was saved and loaded, by which call.

An audit hook of Python sees files as they are opened, renamed and removed. Wrapped functions of torch, DCP,
pickle and safetensors know which of them belong to one save, and what is in it.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from typing import Any, Callable, NamedTuple

from .digests import fetched, held
from .log import Log


class Call(NamedTuple):
    """A function that saves (its first argument) or loads.

    Args:
        at: the place of the argument that has the path.
        names: the names of such arguments.
        opens: it opens the file outside Python, where the audit hook does not see it.
    """

    name: str
    at: int
    names: tuple[str, ...]
    saves: bool = False
    opens: bool = False


_KEYWORD_ONLY = 99
CALLS = {
    "torch.serialization": (Call("save", 1, ("f",), saves=True, opens=True), Call("load", 0, ("f",))),
    "torch.distributed.checkpoint.state_dict_saver": (
        Call("save", _KEYWORD_ONLY, ("checkpoint_id", "storage_writer"), saves=True),
        Call("async_save", _KEYWORD_ONLY, ("checkpoint_id", "storage_writer"), saves=True),
    ),
    "torch.distributed.checkpoint.state_dict_loader": (
        Call("load", _KEYWORD_ONLY, ("checkpoint_id", "storage_reader")),
    ),
    "pickle": (Call("dump", 1, ("file",), saves=True), Call("load", 0, ("file",))),
    "safetensors": (Call("safe_open", 0, ("filename",)),),
    "safetensors.torch": (
        Call("save_file", 1, ("filename",), saves=True, opens=True),
        Call("load_file", 0, ("filename",)),
    ),
}
"""The recorded functions, by module."""
_PATHS = (str, bytes, os.PathLike)
_inside = threading.local()
_uploading: set[str] = set()
"""The paths of asynchronous saves in flight, whose threads call `save` too."""


def watch(log: Log) -> None:
    """Record changes and reads of files of this process."""

    def audit(event: str, args: tuple[Any, ...]) -> None:
        if event in _EVENTS and not getattr(log.quiet, "on", False):
            log.quiet.on = True
            try:
                _EVENTS[event](log, *args)
            finally:
                log.quiet.on = False

    sys.addaudithook(audit)


def _opened(log: Log, path: Any, mode: Any, flags: int) -> None:
    place = log.watched(path)
    if place is None:
        return
    if not flags & (os.O_WRONLY | os.O_RDWR):
        if not os.path.isdir(path):
            log.write("read", path=place)
    elif not flags & os.O_APPEND:
        log.write("open", path=place)
        log.stop.at_change(place, opens=True, truncates=bool(flags & os.O_TRUNC))


def _renamed(log: Log, path: Any, to: Any, *descriptors: int) -> None:
    before, after = log.watched(path), log.watched(to)
    if before and after:
        log.stop.at_change(before, after)
        log.write("rename", path=before, to=after)
        log.stop.renamed(before, after)


def _removed(log: Log, path: Any, *descriptors: int) -> None:
    if place := log.watched(path):
        log.stop.at_change(place)
        log.write("remove", path=place)


_EVENTS: dict[str, Callable[..., None]] = {
    "open": _opened,
    "os.rename": _renamed,
    "os.link": _renamed,
    "os.remove": _removed,
    "os.rmdir": _removed,
    "shutil.rmtree": _removed,
}


def wrap(module: Any, log: Log) -> None:
    """Replace the functions of a module that save or load by ones that record it."""
    package = sys.modules.get(module.__name__.rpartition(".")[0])
    for call in CALLS[module.__name__]:
        function = getattr(module, call.name)
        recorded = _recorded(function, call, log)
        for place in (module, package):  # a package passes it on
            if getattr(place, call.name, None) is function:
                setattr(place, call.name, recorded)


def _recorded(function: Any, call: Call, log: Log) -> Any:
    @functools.wraps(function, updated=())
    def recorded(*args: Any, **kwargs: Any) -> Any:
        named = next((kwargs[name] for name in call.names if kwargs.get(name) is not None), None)
        target = args[call.at] if len(args) > call.at else named
        # A path, an open file, or a storage of DCP.
        places = (target, getattr(target, "name", None), getattr(target, "path", None))
        path = log.watched(next((place for place in places if isinstance(place, _PATHS)), None))
        is_nested = getattr(_inside, "on", False) or path in _uploading
        if path is None or is_nested or "torch" not in sys.modules:
            return function(*args, **kwargs)
        if call.saves:
            log.guarded(_saving, log, path, args[0] if args else next(iter(kwargs.values())))
            if call.opens and isinstance(target, _PATHS):
                log.write("open", path=path)
                log.stop.at_change(path, opens=True, truncates=True)
        _inside.on = True
        try:
            result = function(*args, **kwargs)
        finally:
            _inside.on = False
        done = getattr(result, "upload_completion", result)
        if call.saves and hasattr(done, "add_done_callback"):
            _uploading.add(path)
            done.add_done_callback(functools.partial(_uploaded, log, path))
        else:
            log.write("saved" if call.saves else "load", path=path)
        return result

    return recorded


def _saving(log: Log, path: str, value: Any) -> None:
    log.has_saved = True
    entries = held(value)
    digests = fetched([digest for _, digest in entries])
    log.write("save", path=path, content=dict(zip([name for name, _ in entries], digests)))


def _uploaded(log: Log, path: str, future: Any) -> None:
    _uploading.discard(path)
    if not future.exception():
        log.write("saved", path=path)
