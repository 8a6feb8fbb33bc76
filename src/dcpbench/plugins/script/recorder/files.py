"""Which files below the watched folder were changed and read, and what was saved and loaded, by which call.

An audit hook of Python sees files as they are opened, renamed and removed. Wrapped functions of torch, DCP,
pickle and safetensors know which of them belong to one save, and what is in it.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from typing import Any, Callable

from .digests import content
from .log import Log

_REMOVES = ("os.remove", "os.rmdir", "shutil.rmtree")
_inside = threading.local()
_uploading: set[str] = set()
"""The paths of asynchronous saves in flight, whose threads call `save` too."""


def watch(log: Log) -> None:
    """Record changes and reads of files of this process."""

    def audit(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" or event.startswith(("os.", "shutil.")):
            if getattr(log.quiet, "on", False):
                return
            log.quiet.on = True
            try:
                _seen(log, event, args)
            finally:
                log.quiet.on = False

    sys.addaudithook(audit)


def _seen(log: Log, event: str, args: tuple[Any, ...]) -> None:
    if event == "open":
        path, mode, flags = args
        watched = _watched(log, path)
        if watched is None:
            return
        is_text = isinstance(mode, str)
        writes = any(c in mode for c in "wax+") if is_text else bool(flags & (os.O_WRONLY | os.O_RDWR))
        if not writes:
            if not os.path.isdir(watched):
                log.write("read", path=_short(log, watched))
            return
        appends = "a" in mode if is_text else bool(flags & os.O_APPEND)
        truncates = "w" in mode if is_text else bool(flags & os.O_TRUNC)
        if not appends:
            log.write("open", path=_short(log, watched))
            log.stop.at_change(watched, "", True, truncates)
    elif event in ("os.rename", "os.link"):
        path, to = _watched(log, args[0]), _watched(log, args[1])
        if path and to:
            log.stop.at_change(path, to, False, False)
            log.write("rename", path=_short(log, path), to=_short(log, to))
            log.stop.renamed(path, to)
    elif event in _REMOVES:
        path = _watched(log, args[0])
        if path:
            log.stop.at_change(path, "", False, False)
            log.write("remove", path=_short(log, path))


def _watched(log: Log, path: Any) -> str | None:
    """Return the absolute path of a file below the watched folder, None of others."""
    if isinstance(path, int) or path is None:
        return None
    try:
        full = os.path.abspath(os.fsdecode(path))
    except (TypeError, ValueError):
        return None
    if full.startswith(log.watched + os.sep) and "__pycache__" not in full:
        return full
    return None


def _short(log: Log, path: str) -> str:
    return os.path.relpath(path, log.watched)


def _place(log: Log, path: Any) -> str | None:
    """Return the watched path that a save or load names: a path, an open file, or a storage of DCP."""
    for value in (path, getattr(path, "name", None), getattr(path, "path", None)):
        if isinstance(value, (str, bytes, os.PathLike)):
            return _watched(log, value)
    return None


def _wrap(
    module: Any, name: str, log: Log, path_of: Callable[..., Any], saves: bool, opens: bool = False
) -> None:
    """Replace a function that saves or loads by one that records it; `path_of` returns a path from its
    arguments. The first argument is what a save writes; with `opens` it opens the file outside Python."""
    function = getattr(module, name)

    @functools.wraps(function)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        target = path_of(args, kwargs)
        path = None if getattr(_inside, "on", False) else _place(log, target)
        if path is None or path in _uploading:
            return function(*args, **kwargs)
        place = _short(log, path)
        if saves:
            log.quiet.on = True
            try:
                held = content(args[0] if args else next(iter(kwargs.values())))
            finally:
                log.quiet.on = False
            log.has_saved = True
            log.write("save", by=name, path=place, content=held)
            if opens and isinstance(target, (str, os.PathLike)):
                log.write("open", path=place)
                log.stop.at_change(path, "", True, True)
        _inside.on = True
        try:
            result = function(*args, **kwargs)
        finally:
            _inside.on = False
        done = getattr(result, "upload_completion", result)
        if saves and hasattr(done, "add_done_callback"):
            _uploading.add(path)

            def uploaded(future: Any) -> None:
                _uploading.discard(path)
                if not future.exception():
                    log.write("saved", path=place)

            done.add_done_callback(uploaded)
        else:
            log.write("saved" if saves else "load", path=place)
        return result

    for place in (module, sys.modules.get(module.__name__.rpartition(".")[0])):  # a package passes it on
        if getattr(place, name, None) is function:
            setattr(place, name, recorded)


def _argument(place: int, *names: str) -> Callable[..., Any]:
    """Return a function that finds an argument by its place, or by one of its names."""

    def find(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if len(args) > place:
            return args[place]
        return next((kwargs[name] for name in names if kwargs.get(name) is not None), None)

    return find


def wrap_torch(module: Any, log: Log) -> None:
    """Record `torch.save` and `torch.load`."""
    _wrap(module, "save", log, _argument(1, "f"), saves=True, opens=True)
    _wrap(module, "load", log, _argument(0, "f"), saves=False)


def wrap_dcp_saves(module: Any, log: Log) -> None:
    """Record saves of DCP."""
    for name in ("save", "async_save"):
        _wrap(module, name, log, _argument(99, "checkpoint_id", "storage_writer"), saves=True)


def wrap_dcp_loads(module: Any, log: Log) -> None:
    """Record loads of DCP."""
    _wrap(module, "load", log, _argument(99, "checkpoint_id", "storage_reader"), saves=False)


def wrap_pickle(module: Any, log: Log) -> None:
    """Record `pickle.dump` and `pickle.load`, where torch is used."""

    def if_torch(find: Callable[..., Any]) -> Callable[..., Any]:
        return lambda args, kwargs: find(args, kwargs) if "torch" in sys.modules else None

    _wrap(module, "dump", log, if_torch(_argument(1, "file")), saves=True)
    _wrap(module, "load", log, if_torch(_argument(0, "file")), saves=False)


def wrap_safetensors_torch(module: Any, log: Log) -> None:
    """Record `save_file` and `load_file` of safetensors."""
    _wrap(module, "save_file", log, _argument(1, "filename"), saves=True, opens=True)
    _wrap(module, "load_file", log, _argument(0, "filename"), saves=False)


def wrap_safetensors(module: Any, log: Log) -> None:
    """Record reads of `safe_open`, which opens files outside Python."""
    inner = module.safe_open

    def safe_open(filename: Any, *args: Any, **kwargs: Any) -> Any:
        path = _watched(log, filename)
        if path:
            log.write("read", path=_short(log, path))
        return inner(filename, *args, **kwargs)

    module.safe_open = safe_open
