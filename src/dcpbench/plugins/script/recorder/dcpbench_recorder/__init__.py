"""The recorder: runs in every process of the script, and needs torch alone.

It writes one JSON object a line into a file of each process: what each optimizer step depends on (`steps`),
and which files were changed and read (`files`). It imports nothing before the script does, and no other part
of dcpbench, because the script's environment can be another one.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from typing import Any, Callable

from . import files
from .log import Log


def _record_steps(torch: Any, log: Log) -> None:
    from . import steps  # imports torch

    steps.install(log)


_HOOKS: dict[str, Callable[[Any, Log], None]] = {
    "torch": _record_steps,
    **dict.fromkeys(files.CALLS, files.wrap),
}
"""What is done after a module was imported, by its name."""


def start(settings: str) -> None:
    """Record this process, as the JSON file `settings` says."""
    log = Log(settings)
    sys.meta_path.insert(0, _AfterImport(log))
    files.watch(log)


class _AfterImport(importlib.abc.MetaPathFinder):
    """Call a hook right after the import of its module."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._left = dict(_HOOKS)
        for name in [name for name in self._left if name in sys.modules]:
            log.guarded(self._left.pop(name), sys.modules[name], log)

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        """Return the module's own spec, whose loader then calls the hook."""
        hook = self._left.pop(fullname, None)
        spec = importlib.util.find_spec(fullname) if hook else None
        if hook is None or spec is None or spec.loader is None:
            return None
        run, log = spec.loader.exec_module, self._log

        def exec_module(module: Any) -> None:
            run(module)
            log.guarded(hook, module, log)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
