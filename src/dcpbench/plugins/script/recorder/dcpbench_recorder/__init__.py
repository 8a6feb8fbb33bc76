"""The recorder: runs in every process of the script, and needs torch alone.

It imports nothing before the script does, and no other part of dcpbench: the script's environment can be
another one.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import SimpleNamespace
from typing import Any, Callable

from . import files
from .log import Log

_HOOKS: dict[str, Callable[[Any, Log], None]] = {
    "torch": lambda torch, log: importlib.import_module(".steps", __name__).install(log),
    **dict.fromkeys(files.CALLS, files.wrap),
}
"""What is done after a module was imported, by its name."""


def start(settings: str) -> None:
    """Record this process, as the JSON file `settings` says."""
    log = Log(settings)
    left = dict(_HOOKS)

    def find_spec(fullname: str, path: Any, target: Any = None) -> Any:
        """Return the module's own spec, whose loader calls the hook right after the import."""
        hook = left.pop(fullname, None)
        spec = importlib.util.find_spec(fullname) if hook else None
        if hook and spec and spec.loader:
            run = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                run(module)
                log.guarded(hook, module, log)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    for name in [name for name in left if name in sys.modules]:
        log.guarded(left.pop(name), sys.modules[name], log)
    sys.meta_path.insert(0, SimpleNamespace(find_spec=find_spec))
    files.watch(log)
