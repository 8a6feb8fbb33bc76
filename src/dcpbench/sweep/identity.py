"""The identity of a configuration: `(CellKey.digest, repeat)` tells the runs of a sweep apart, and finds the
same runs in other sweeps."""

from collections.abc import Iterator
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from dcpbench.code.provenance import conf_folders
from dcpbench.config.schema import Config
from dcpbench.core.axes import AXES
from dcpbench.core.cell_key import CellKey, is_code_path
from dcpbench.core.plugins import declared_values


def identity_of(config: Config) -> CellKey:
    """Return the identity of a configuration, in which a value's name stands for the code of its file."""
    return CellKey.of(config, _code_paths)


@cache
def _code_paths(key: str, name: str) -> frozenset[str]:
    """Return the code paths that a value of a group has in `conf/`, of dcpbench and of plug-ins; empty for a
    value of the user's."""
    group = AXES[key].values_in if key in AXES else key
    paths = (folder / group / f"{name}.yaml" for folder in conf_folders() if Path(name).name == name)
    contents = [yaml.safe_load(path.read_text("utf-8")) for path in paths if path.is_file()]
    values = texts_in([*contents, declared_values().get(group, {}).get(name)])
    return frozenset(filter(is_code_path, (text for _, text in values)))


def texts_in(node: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield every text in a configuration, at any depth, with the key that it has or is listed under."""
    if isinstance(node, str):
        yield key, node
    items = vars(node) if is_dataclass(node) else node
    if isinstance(items, dict):
        for name, item in items.items():
            yield from texts_in(item, name)
    elif isinstance(items, list):
        for item in items:
            yield from texts_in(item, key)
