"""The identity of a cell, which resume, compare, history, estimates and the disk check share.

Each field of the configuration is declared in `dcpbench.config.schema` either as part of the identity of a
cell (it changes the measurement) or with `how_run` (retry, time-outs, where files go). Only rows of equal
identity are compared.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, cached_property
from typing import Any

from dcpbench.core.moved import first_names

HOW_RUN = "how_run"
"""Key in the metadata of a dataclass field that is not part of the identity."""

Value = str | int | float | bool


@dataclass(frozen=True)
class CellKey:
    """The identity of a cell: every value of its configuration that is not null or empty, by its dotted key.
    A list is stored as JSON text; device and world size are the ones that the cell runs with.

    Null and absent are the same, so that adding a key whose default is null changes no identity.

    >>> key = CellKey({"parallel.name": "ddp", "world_size": 2})
    >>> key.differences(CellKey({"parallel.name": "fsdp2", "world_size": 2}))
    {'parallel.name': ('ddp', 'fsdp2')}
    """

    values: Mapping[str, Value]

    @classmethod
    def of(cls, config: Any) -> "CellKey":
        """Return the identity of a configuration, without its `how_run` fields."""
        return cls(dict(_leaves(config)))

    @cached_property
    def digest(self) -> str:
        """Digest of the identity; equal exactly for equal identities."""
        return digest_of(self._by_first_names)

    @cached_property
    def _by_first_names(self) -> dict[str, Value]:
        """The values, with the original names of modules that have moved."""
        return {
            key: first_names(value) if isinstance(value, str) else value for key, value in self.values.items()
        }

    def part(self, keys: Iterable[str]) -> str:
        """Return the digest of the values at or below these keys, to find similar cells."""
        wanted = _with_dots(keys)
        return digest_of(
            {key: value for key, value in self._by_first_names.items() if f"{key}.".startswith(wanted)}
        )

    def differences(self, other: "CellKey") -> dict[str, tuple[Value | None, Value | None]]:
        """Return the keys whose values differ, each with this value and the other one."""
        mine, its = self._by_first_names, other._by_first_names
        keys = [key for key in dict.fromkeys([*mine, *its]) if mine.get(key) != its.get(key)]
        return {key: (self.values.get(key), other.values.get(key)) for key in keys}


def is_below(key: str, keys: Iterable[str]) -> bool:
    """Return whether a dotted key is one of these, or below one."""
    return f"{key}.".startswith(_with_dots(keys))


def _with_dots(keys: Iterable[str]) -> tuple[str, ...]:
    return tuple(f"{key}." for key in keys)


def digest_of(content: Any) -> str:
    """Return a short digest of JSON data."""
    text = json.dumps(content, sort_keys=True, default=_plain)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Value]]:
    if is_dataclass(node):
        node = {name: getattr(node, name) for name in _of_identity(node.__class__)}
    for name, value in node.items():
        if isinstance(value, str | int | float):
            yield f"{prefix}{name}", value
        elif isinstance(value, dict) or is_dataclass(value):
            yield from _leaves(value, f"{prefix}{name}.")
        elif isinstance(value, list | tuple):
            if value:
                yield f"{prefix}{name}", json.dumps(value, default=_plain)
        elif value is not None:
            yield f"{prefix}{name}", _plain(value)


@cache
def _of_identity(kind: type[Any]) -> list[str]:
    """Return the fields of a dataclass that are part of the identity."""
    return [item.name for item in fields(kind) if not item.metadata.get(HOW_RUN)]


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | int | float | bool) else str(value)
