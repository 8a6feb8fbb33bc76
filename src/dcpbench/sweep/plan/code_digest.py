"""A digest of the code that ran: of what the files say, so that it is the same in a checkout and in the wheel
made from it, another in a checkout that was changed, and untouched by a commit that changes none of it."""

import hashlib
from collections.abc import Iterator
from dataclasses import asdict
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dcpbench.config.cell_key import digest_of
from dcpbench.config.schema import Config

_OURS = ("dcpbench", "hydra_plugins.dcpbench_launcher")
_BY_VERSION = "torch"


def code_digest(config: Config) -> str:
    """Of the sources of dcpbench, and of every package that a `target` of the configuration is from.

    Torch's own are told apart by its version. What those packages import is not looked at.
    """
    packages = {target.partition(".")[0] for target in _targets(asdict(config))}
    packages -= {_BY_VERSION, *(name.partition(".")[0] for name in _OURS)}
    return digest_of([_package_digest(name) for name in (*_OURS, *sorted(packages))])


def _targets(value: Any) -> Iterator[str]:
    if isinstance(value, list):
        for item in value:
            yield from _targets(item)
    if not isinstance(value, dict):
        return
    if isinstance(target := value.get("target"), str):
        yield target
    for item in value.values():
        yield from _targets(item)


@cache
def _package_digest(name: str) -> str:
    """A package is found without being imported, as the driver has no torch."""
    sources = hashlib.sha256()
    for root in _roots(name):
        for path in sorted(root.rglob("*.py") if root.is_dir() else [root]):
            sources.update(f"{path.relative_to(root)}\0".encode())
            sources.update(hashlib.sha256(path.read_bytes()).digest())
    return sources.hexdigest()


def _roots(name: str) -> list[Path]:
    """The folders of a package, or the file of a module; none if there is no such thing."""
    found = find_spec(name)
    if found is None:
        return []
    folders = [Path(place) for place in found.submodule_search_locations or []]
    return folders or ([Path(found.origin)] if found.origin and found.has_location else [])
