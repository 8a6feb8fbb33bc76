"""Files below the watched folder: an audit hook sees their changes, wrapped functions saves and loads."""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
from typing import Any, Callable

from .log import Log, replace
from .protection import CHANGES, full_path

CALLS = {
    "torch.serialization": {"save": "save_file", "load": "load"},
    "torch.distributed.checkpoint.state_dict_saver": {"save": "save", "async_save": "upload"},
    "torch.distributed.checkpoint.state_dict_loader": {"load": "load"},
    "pickle": {"dump": "save", "load": "load"},
    "safetensors": {"safe_open": "load"},
    "safetensors.torch": {"save_file": "save_file", "load_file": "load"},
}
"""The effect of the recorded functions of a module: `load`, or `save` their first argument; `upload` returns
before it has ended, and calls `save` in a thread; `save_file` opens the file outside Python, where the audit
hook does not see it."""
_ELSEWHERE = "the saved state"
"""The path of a save into memory or another folder: files that are changed after the same step are its."""
_inside = threading.local()
_uploading: set[str] = set()
"""The paths of asynchronous saves in flight, whose threads call `save` too."""


def watch(log: Log) -> None:
    """Record changes and reads of files of this process, and end it before it changes one of the user."""

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event in CHANGES:
            log.guarded(_protect, log, event, *args)
        if event in _EVENTS:
            log.guarded(_EVENTS[event], log, *args)

    sys.addaudithook(hook)
    for name in ("fsync", "fdatasync", "sync"):  # no audit event
        setattr(os, name, log.wrapped(getattr(os, name), after=functools.partial(_sync, log)))


def _sync(log: Log, file: Any = None) -> None:
    """Record that what was written to a file, or to all, is on the disk."""
    number = file if file is None or isinstance(file, int) else file.fileno()
    path = "" if number is None else log.watched(os.readlink(f"/proc/self/fd/{number}"))
    if path is not None:
        log.write("sync", path=path)


def _protect(log: Log, event: str, *args: Any) -> None:
    """End this process at once if the event would change a file of the user."""
    if path := log.protection.harmed(event, args):
        log.write("harm", path=path, change=event)
        log.mark("harm")
        signal.raise_signal(signal.SIGKILL)


def _opened(log: Log, path: Any, mode: Any, flags: int) -> None:
    place = log.watched(path)
    if place is None:
        return
    if not flags & (os.O_WRONLY | os.O_RDWR):
        if not os.path.isdir(path):
            log.write("read", path=place)
    elif not flags & os.O_APPEND:
        truncates = bool(flags & os.O_TRUNC)
        log.write("open", path=place, truncates=truncates)
        log.stop.at_change(place, opens=True, truncates=truncates)


def _copied(log: Log, path: Any, to: Any) -> None:
    before, after = log.watched(path), log.watched(to)
    if before and after:
        log.write("copy", path=before, to=after)


def _moved(kind: str, log: Log, path: Any, to: Any, path_fd: int = -1, to_fd: int = -1) -> None:
    before, after = (log.watched(full_path(*of), names_link=True) for of in ((path, path_fd), (to, to_fd)))
    if before and not after and kind == "rename":
        _removed(log, path, path_fd)
    elif before and after:
        log.stop.at_change(before, after)
        log.write(kind, path=before, to=after)
    elif after:
        log.stop.at_change(after)
        log.write("open", path=after)


def _removed(log: Log, path: Any, folder: int | None = -1) -> None:
    if before := log.watched(full_path(path, folder), names_link=True):
        log.stop.at_change(before)
        log.write("remove", path=before)


_EVENTS: dict[str, Callable[..., None]] = {
    "open": _opened,
    "shutil.copyfile": _copied,
    "os.link": functools.partial(_moved, "link"),
    "os.rename": functools.partial(_moved, "rename"),
    **dict.fromkeys(("os.remove", "os.rmdir", "shutil.rmtree"), _removed),
}


def wrap(module: Any, log: Log) -> None:
    """Replace the functions of a module that save or load by ones that record it."""
    for name, action in CALLS[module.__name__].items():
        replace(module, name, _recorded(getattr(module, name), action, log))


def _recorded(function: Any, action: str, log: Log) -> Any:
    saves = action != "load"

    @functools.wraps(function, updated=())
    def recorded(*args: Any, **kwargs: Any) -> Any:
        values = (*args, *kwargs.values())
        if action == "save_file" and len(values) > 1:
            log.guarded(_protect, log, "open", values[1], "w", os.O_WRONLY)
        path = _path(log, values[saves:])
        if action == "save_file" and path is None:
            path = _ELSEWHERE
        if path is None or getattr(_inside, "on", False) or "torch" not in sys.modules:
            return function(*args, **kwargs)
        is_new = path not in _uploading
        if is_new and not saves:
            log.write("load", path=path)
        elif is_new:
            log.guarded(_saving, log, path, *values[:1])
            if action == "save_file" and any(map(log.watched, values[1:2])):
                log.write("open", path=path)
                log.stop.at_change(path, opens=True, truncates=True)

        def uploaded(future: Any) -> None:
            _uploading.discard(path)
            if not future.exception():
                log.write("saved", path=path)

        _inside.on = True
        if action == "upload":  # before its thread can call `save`
            _uploading.add(path)
        try:
            result = function(*args, **kwargs)
        except BaseException:
            _uploading.discard(path)
            raise
        finally:
            _inside.on = False
        upload = getattr(result, "upload_completion", result)
        if action == "upload" and hasattr(upload, "add_done_callback"):
            upload.add_done_callback(uploaded)
        elif saves and is_new:
            log.write("saved", path=path)
        return result

    return recorded


def _path(log: Log, arguments: tuple[Any, ...]) -> str | None:
    """Return the path below the watched folder that an argument is or, as a file or storage of DCP, has."""
    others = [getattr(argument, name, None) for argument in arguments for name in ("name", "path")]
    return next(filter(None, map(log.watched, [*arguments, *others])), None)


def _saving(log: Log, path: str, value: Any) -> None:
    """Record what is saved."""
    from .digests import fetched, held  # imports torch

    log.mark(f"saved-{log.steps}")
    log.write("save", path=path, **fetched({"content": held(value)}))
