"""The user's code in the current folder: found without being imported, and imported by ranks alone."""

import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path

from dcpbench import SAFE_PATH

_VARIABLE, _VALUE = SAFE_PATH


def import_from_current_folder() -> None:
    """Have a rank, and what its cells start, find modules in the current folder too; last, so that nothing
    there replaces an installed module. The user may have forbidden it (PYTHONSAFEPATH)."""
    if os.environ.get(_VARIABLE) == _VALUE:
        del os.environ[_VARIABLE]
        if (folder := str(Path.cwd())) not in sys.path:
            sys.path.append(folder)


def find_package(name: str) -> ModuleSpec | None:
    """Find a package, or a module that is in none, as a rank would; it is not imported."""
    if found := find_spec(name):
        return found
    allowed = os.environ.get(_VARIABLE) == _VALUE
    return PathFinder.find_spec(name, [str(Path.cwd())]) if allowed else None


def file_of(target: str) -> str | None:
    """The file that defines a `target`, as far as it is known without an import; None if no file does."""
    first, *names = target.replace(":", ".").split(".")
    found = find_package(first)
    for name in names:
        inside = found.submodule_search_locations if found else None
        module = PathFinder.find_spec(f"{found.name}.{name}", [*inside]) if found and inside else None
        if module is None:
            break
        found = module
    return found.origin if found else None
