"""The recorder: runs in every process of the script, and needs torch alone.

It imports nothing before the script does, and no other part of dcpbench: the script's environment can be
another one.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
from typing import Any, Callable

from . import files, generators
from .log import Log

_HOOKS: dict[str, Callable[[Any, Log], None]] = {
    "torch": lambda torch, log: importlib.import_module(".steps", __name__).install(log),
    **dict.fromkeys(files.CALLS, files.wrap),
    **dict.fromkeys(generators.CALLS, generators.wrap),
}
"""Hooks that are called after a module was executed, by its name."""


def start(settings: str) -> None:
    """Record this process, as the JSON file `settings` says."""
    log = Log(settings)
    log.write("process")
    for name in [name for name in _HOOKS if name in sys.modules]:
        log.guarded(_HOOKS[name], sys.modules[name], log)
    loaders: Any = importlib.machinery.SourceFileLoader.__mro__[-2]  # of files with and without source

    def executed(_: Any, module: Any) -> None:
        if hook := _HOOKS.get(module.__name__):
            hook(module, log)

    loaders.exec_module = log.wrapped(loaders.exec_module, after=executed)
    files.watch(log)
