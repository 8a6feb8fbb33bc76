"""Files of the user: the command is ended before it changes one."""

from __future__ import annotations

import os
import re
import stat
from typing import Any, Iterator

_SYSTEM = ("/dev", "/proc", "/sys", "/run")
_OF_HOME = (".cache", ".config", ".nv", ".torch", ".triton")
_CACHE = re.compile(r"(?i)(?:.*[._-])?cache|__pycache__|wandb")
"""Names of files and folders in which programs keep copies; that of wandb has links to its newest logs."""
_CACHES_BY = re.compile(r"[A-Z_]*CACHE[A-Z_]*|HF_HOME|TORCH_HOME|TRITON_HOME|MPLCONFIGDIR")
_TEMPORARY_BY = re.compile(r"TMPDIR|TEMP|TMP")
CHANGES = {"open", "os.truncate", "os.rename", "os.remove", "shutil.rmtree"}
"""Audit events of changes of files that can be there before."""
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_TRUNC


class Protection:
    """The files that were there when the check of the command began, and are not in its output, or in a
    temporary or cache folder."""

    def __init__(self, known: dict[str, Any]) -> None:
        self._began: float = known.get("began", 0.0)  # without it, nothing is protected
        self._own: list[str] = known.get("own", [])
        self._named: list[str] = [*map(os.path.realpath, known.get("named", [os.sep]))]  # first, its cwd
        self._created: set[str] = set()

    def harmed(self, event: str, args: tuple[Any, ...]) -> str | None:
        """Return the path of a protected file that an audit event is about to open for writing, rename,
        replace or remove; None if there is none."""
        if not self._began or (event == "open" and not args[2] & _WRITES):
            return None
        if opens := event in ("open", "os.truncate"):
            named = [args[:1]]
        else:  # each path with the folder that it is in
            named = [args[::2], args[1::2]] if event == "os.rename" else [args[:2]]
        paths = [path for one in named if (path := full_path(*one)) is not None]
        return next(filter(None, (self._harmed(path, opens) for path in paths)), None)

    def _harmed(self, path: str, opens: bool) -> str | None:
        """Check a file that is opened, or that is moved or removed, with all below it."""
        above, name = os.path.split(path)
        real = os.path.realpath(path) if opens else os.path.join(os.path.realpath(above), name)
        if any(is_below(real, folder) for folder in self._own):
            return None
        if not os.path.lexists(real):
            self._created.add(real)
            return None
        for file in [real] if opens else _files(real):
            try:
                status = os.lstat(file)
            except OSError:  # another process removed it
                continue
            is_old = status.st_ctime < self._began and file not in self._created
            is_file = stat.S_ISREG(status.st_mode) or (stat.S_ISLNK(status.st_mode) and not opens)
            if is_file and is_old and (status.st_size or not opens) and not self._is_of_programs(file):
                return file
        return None

    def _is_of_programs(self, path: str) -> bool:
        """Tell whether a file is in a cache or temporary folder. A file in a temporary folder is the user's
        if the command names it or was typed above it."""
        home = os.path.expanduser("~")
        folders = [*_SYSTEM, *_named_by(_CACHES_BY), *(os.path.join(home, name) for name in _OF_HOME)]
        inner = path[len(self._named[0]) :] if is_below(path, *self._named[:1]) else path
        if any(map(_CACHE.fullmatch, inner.split(os.sep))) or any(is_below(path, one) for one in folders):
            return True
        places = {os.path.realpath(place) for place in (*_named_by(_TEMPORARY_BY), "/tmp", "/var/tmp")}  # noqa: S108
        named = [name for name in self._named if is_below(path, name)]
        return any(
            is_below(path, place) and not any(name != place and is_below(name, place) for name in named)
            for place in places
        )


def full_path(path: Any, folder: int | None = None) -> str | None:
    """Return the path that a call names, perhaps in an open folder; None of what is not a path."""
    try:
        name = os.fsdecode(path)
    except TypeError:  # a descriptor, or a file
        return None
    if folder is not None and folder >= 0:
        name = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), name)
    return os.path.abspath(name)


def _named_by(variables: re.Pattern[str]) -> list[str]:
    """Return the values of environment variables with these names."""
    return [value for name, value in os.environ.items() if value and variables.fullmatch(name)]


def is_below(path: str, folder: str) -> bool:
    """Tell whether a path is a folder, or below it."""
    real = os.path.realpath(folder)
    return path == real or path.startswith(real.rstrip(os.sep) + os.sep)


def _files(path: str) -> Iterator[str]:
    """Yield a file, or those below a folder."""
    yield path
    for folder, folders, names in os.walk(path) if not os.path.islink(path) else ():
        yield from (os.path.join(folder, name) for name in folders + names)
