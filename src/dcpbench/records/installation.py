"""Digests of the code that a process runs: of dcpbench, of plug-ins, and of packages that a cell names."""

import hashlib
from contextlib import suppress
from functools import cache
from pathlib import Path

from dcpbench.config.schema import conf_folder
from dcpbench.core.cell_key import digest_of
from dcpbench.core.plugins import plugin_names, plugins
from dcpbench.records.files import files_below
from dcpbench.records.user_code import find_package

OURS = ("dcpbench", "hydra_plugins.dcpbench_launcher")
"""The packages of dcpbench."""


def conf_folders() -> list[Path]:
    """Return every folder that is laid out like `conf/`: dcpbench's own, then those of plug-ins."""
    return [conf_folder(), *(plugin.conf for plugin in plugins() if plugin.conf)]


def installation() -> dict[str, str]:
    """Return digests of the dcpbench and the plug-ins that this process imports, for `environment.json`.

    Two hosts whose digests differ may come to different verdicts about the same cell.
    """
    others = [name for name in plugin_names() if not name.startswith("dcpbench.")]
    plugins = {name: digest_of(package_digest(name.partition(".")[0])) for name in others}
    return {
        "dcpbench": digest_of([*map(package_digest, OURS), *map(_conf_digest, conf_folders())]),
        "plugins": ", ".join(f"{name} {digest}" for name, digest in sorted(plugins.items())) or "none",
    }


@cache
def package_digest(name: str) -> str:
    """Return a digest of the sources of a package or module; an empty one if it does not exist.

    The package is found without being imported, as the driver has no torch.
    """
    found = None
    with suppress(ModuleNotFoundError):  # the package that it would be in
        found = find_package(name)
    roots = [Path(place) for place in found.submodule_search_locations or []] if found else []
    if found and not roots and found.origin and found.has_location:
        roots = [Path(found.origin)]
    return _files_digest(*roots)


def _conf_digest(folder: Path) -> str:
    return _files_digest(folder, pattern="*.yaml")


def _files_digest(*roots: Path, pattern: str = "*.py") -> str:
    """Return a digest of the files below these folders whose names match, and of their names."""
    sources = hashlib.sha256()
    for root in roots:
        inside = files_below(root) if root.is_dir() else [root]
        for path in (path for path in inside if path == root or path.match(pattern)):
            sources.update(f"{path.relative_to(root)}\0".encode())
            sources.update(hashlib.sha256(path.read_bytes()).digest())
    return sources.hexdigest()
