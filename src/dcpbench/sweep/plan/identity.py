"""What a row was measured of: a digest of the cell's configuration and one of the code that ran.

A row stands as long as both, and torch's version, are what they were. The digest of the code is of
what the files say: the same in a checkout and in the wheel made from it, another in a checkout that was
changed, and untouched by a commit that changes none of it.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from enum import Enum
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dcpbench.config.schema import OF_THE_SWEEP, REPEATS, Config
from dcpbench.records.store import Row
from dcpbench.sweep.plan.known_failures import KnownFailure

_OURS = ("dcpbench", "hydra_plugins.dcpbench_launcher")
_BY_VERSION = "torch"
_SHOWN = 16


def config_digest(config: Config, row: Row, known_failures: list[KnownFailure]) -> str:
    """Of all that a cell is told, device and world size decided, and of what is expected of its row.

    The repeats of a cell have the same. `known_failures` is the whole list; only what it says of this
    cell counts.
    """
    told = asdict(config)
    for key in (*OF_THE_SWEEP, REPEATS, "repeat", "known_failures"):
        del told[key]
    told["expected"] = [asdict(failure) for failure in known_failures if failure.covers(row)]
    return _digest(json.dumps(told, sort_keys=True, default=_plain).encode())


def code_digest(config: Config) -> str:
    """Of the sources of dcpbench, and of every package that a `target` of the configuration is from.

    Torch's own are told apart by its version. What those packages import is not looked at.
    """
    packages = {target.partition(".")[0] for target in _targets(asdict(config))}
    packages -= {_BY_VERSION, *(name.partition(".")[0] for name in _OURS)}
    return _digest("".join(_package_digest(name) for name in (*_OURS, *sorted(packages))).encode())


def _targets(value: Any) -> Iterator[str]:
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


def _plain(value: object) -> object:
    return value.value if isinstance(value, Enum) else str(value)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:_SHOWN]
