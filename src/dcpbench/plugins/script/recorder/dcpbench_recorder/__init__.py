"""The recorder: runs in every process of the script, and needs torch alone.

It imports nothing before the script does, and no other part of dcpbench: the script's environment can be
another one.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any, Callable

from . import files
from .log import Log

_HOOKS: dict[str, Callable[[Any, Log], None]] = {
    "torch": lambda torch, log: importlib.import_module(".steps", __name__).install(log),
    **dict.fromkeys(files.CALLS, files.wrap),
}
"""Hooks that are called after a module was executed, by its name."""


class _Finder:
    """Finds the modules that have a hook, with the finders that follow it."""

    def __init__(self, log: Log) -> None:
        self._log = log

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        """Return the module's own spec, with a loader that calls the hook. Many look for a spec and import
        nothing: they change nothing here."""
        if fullname not in _HOOKS:
            return None
        following = sys.meta_path[sys.meta_path.index(self) + 1 if self in sys.meta_path else 0 :]
        finds = [finder.find_spec for finder in following if hasattr(finder, "find_spec")]
        spec = next(filter(None, (find(fullname, path, target) for find in finds)), None)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _Loader(spec.loader, self._log)  # type: ignore[assignment]
        return spec


class _Loader:
    """A module's loader, until it executes the module."""

    def __init__(self, loader: Any, log: Log) -> None:
        self._loader, self._log = loader, log

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def exec_module(self, module: Any) -> None:
        """Execute the module, which has its own loader from now on, and call the hook."""
        module.__loader__ = module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._log.guarded(_HOOKS[module.__name__], module, self._log)


def start(settings: str) -> None:
    """Record this process, as the JSON file `settings` says."""
    log = Log(settings)
    log.write("process")
    for name in [name for name in _HOOKS if name in sys.modules]:
        log.guarded(_HOOKS[name], sys.modules[name], log)
    sys.meta_path.insert(0, _Finder(log))
    files.watch(log)
