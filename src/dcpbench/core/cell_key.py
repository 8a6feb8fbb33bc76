"""What a cell is: the one definition that resume, compare, history, estimates and the disk check share.

Each field of the configuration is declared once, in `dcpbench.config.schema`, as part of the identity of a
cell (what is measured) or as how it is run (`how_run`: retry, time-outs, where its files go). Two rows
compare only where their identities are equal.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, cached_property
from typing import Any

from dcpbench.core.moved import first_names

HOW_RUN = "how_run"
"""In a field's metadata: it says how a cell is run and is no part of what it is."""

Value = str | int | float | bool


@dataclass(frozen=True)
class CellKey:
    """The identity of a cell: `values` has every leaf of its configuration that is not null or empty by its
    dotted key, device and world size decided; a list is its JSON text.

    Null and not there are the same, so that a new key whose default is null changes no identity.
    """

    values: Mapping[str, Value]

    @classmethod
    def of(cls, config: Any) -> "CellKey":
        """The identity that a configuration says; what is only about how it is run is left out."""
        return cls(dict(_leaves(config)))

    @cached_property
    def digest(self) -> str:
        """The same for equal identities."""
        return digest_of(self._by_first_names)

    @cached_property
    def _by_first_names(self) -> dict[str, Value]:
        """The values, modules that have moved under their first names."""
        named = (
            (key, first_names(value) if isinstance(value, str) else value)
            for key, value in self.values.items()
        )
        return dict(named)

    def part(self, keys: Iterable[str]) -> str:
        """The digest of those values whose keys are these or lie below them: for cells that are alike."""
        wanted = _begins(keys)
        return digest_of(
            {key: value for key, value in self._by_first_names.items() if f"{key}.".startswith(wanted)}
        )

    def differences(self, other: "CellKey") -> dict[str, tuple[Value | None, Value | None]]:
        """The keys whose values are not the same in both: this one's value and the other's."""
        mine, its = self._by_first_names, other._by_first_names
        keys = [key for key in dict.fromkeys([*mine, *its]) if mine.get(key) != its.get(key)]
        return {key: (self.values.get(key), other.values.get(key)) for key in keys}


def lies_below(key: str, keys: Iterable[str]) -> bool:
    """Whether a dotted key is one of these, or below one."""
    return f"{key}.".startswith(_begins(keys))


def _begins(keys: Iterable[str]) -> tuple[str, ...]:
    """What a dotted key that lies below one of these begins with, if it ends with a dot too."""
    return tuple(f"{key}." for key in keys)


def digest_of(content: Any) -> str:
    """A short digest of plain data."""
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
    """Those fields of a dataclass that are part of what a cell is."""
    return [item.name for item in fields(kind) if not item.metadata.get(HOW_RUN)]


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | int | float | bool) else str(value)
