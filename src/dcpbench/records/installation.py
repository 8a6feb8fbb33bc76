"""The code that a process runs: its digests, and the user's modules in the current folder.

The driver finds such a module without importing it; only ranks import it.
"""

import hashlib
import os
import sys
from contextlib import suppress
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path

from dcpbench import SAFE_PATH
from dcpbench.config.schema import conf_folder
from dcpbench.core.cell_key import digest_of
from dcpbench.core.plugins import plugin_names, plugins
from dcpbench.records.files import files_below

_VARIABLE, _VALUE = SAFE_PATH
OURS = ("dcpbench", "hydra_plugins.dcpbench_launcher")
"""The packages of dcpbench."""


def conf_folders() -> list[Path]:
    """Return every folder that is laid out like `conf/`: dcpbench's own, then those of plug-ins."""
    return [conf_folder(), *(plugin.conf for plugin in plugins() if plugin.conf)]


def installation() -> dict[str, str]:
    """Return digests of the dcpbench and the plug-ins that this process imports, for `environment.json`.

    Two hosts whose digests differ can end with different verdicts about the same cell.
    """
    others = [name for name in plugin_names() if not name.startswith("dcpbench.")]
    plugins = {name: digest_of(package_digest(name.partition(".")[0])) for name in others}
    confs = [_files_digest(folder, pattern="*.yaml") for folder in conf_folders()]
    return {
        "dcpbench": digest_of([*map(package_digest, OURS), *confs]),
        "plugins": ", ".join(f"{name} {digest}" for name, digest in sorted(plugins.items())) or "none",
    }


@cache
def package_digest(name: str) -> str:
    """Return a digest of the sources of a package or module; an empty one if it does not exist.

    The package is found without being imported, as the driver has no torch.
    """
    return _files_digest(*package_roots(name))


def package_roots(name: str) -> list[Path]:
    """Return the folders of a package, or the file of a module; none if it does not exist."""
    found = None
    with suppress(ModuleNotFoundError):  # the package that it would be in
        found = find_package(name)
    roots = [Path(place) for place in found.submodule_search_locations or []] if found else []
    if found and not roots and found.origin and found.has_location:
        roots = [Path(found.origin)]
    return roots


def source_files(root: Path, pattern: str = "*.py") -> list[Path]:
    """Return the files below a folder whose names match; a file itself."""
    inside = files_below(root) if root.is_dir() else [root]
    return [path for path in inside if path == root or path.match(pattern)]


def _files_digest(*roots: Path, pattern: str = "*.py") -> str:
    """Return a digest of the files below these folders whose names match, and of their names."""
    sources = hashlib.sha256()
    for root in roots:
        for path in source_files(root, pattern):
            sources.update(f"{path.relative_to(root)}\0".encode())
            sources.update(hashlib.sha256(path.read_bytes()).digest())
    return sources.hexdigest()


def import_from_current_folder() -> None:
    """Let a rank, and processes that it starts, import modules of the current folder. It is last on the path,
    so that it replaces no installed module, unless the user has forbidden it (PYTHONSAFEPATH)."""
    if os.environ.get(_VARIABLE) == _VALUE:
        del os.environ[_VARIABLE]
        if (folder := str(Path.cwd())) not in sys.path:
            sys.path.append(folder)


def find_package(name: str) -> ModuleSpec | None:
    """Find a package, or a top-level module, as a rank would; do not import it."""
    if found := find_spec(name):
        return found
    allowed = os.environ.get(_VARIABLE) == _VALUE
    return PathFinder.find_spec(name, [str(Path.cwd())]) if allowed else None


def file_of(target: str) -> str | None:
    """Return the file that defines a `target`, as far as it is known without an import; None if no file
    does."""
    first, *names = target.replace(":", ".").split(".")
    found = find_package(first)
    for name in names:
        inside = found.submodule_search_locations if found else None
        # Without its parent's name: a folder without __init__.py would be looked up in an imported parent.
        module = PathFinder.find_spec(name, [*inside]) if inside else None
        if module is None:
            break
        found = module
    return found.origin if found else None
