"""The identity of a cell, which resume, compare, history, estimates and the disk check share.

Each field of the configuration is declared in `dcpbench.config.schema` either as part of the identity of a
cell (it changes the measurement) or with `how_run` (retry, time-outs, where files go). Only rows of equal
identity are compared.

A value of a group is identified by its name and its settings. Paths of code that its file in `conf/` names,
such as its `target`, are left out, so that a module can move. A path that a user typed is part of the
identity.
"""

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import Field, dataclass, fields, is_dataclass
from functools import cache, cached_property
from typing import Any

HOW_RUN = "how_run"
"""Key in the metadata of a dataclass field that is not part of the identity."""

Value = str | int | float | bool
_REMOVED: dict[str, Value] = {"load_into.scheduler": True}
"""Keys that no longer exist, with the value of every cell that can still be run: its identity stays."""


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
    def of(cls, config: Any, code_paths: Callable[[str, str], Collection[str]]) -> "CellKey":
        """Return the identity of a configuration, without its `how_run` fields.

        Args:
            code_paths: returns the code paths in the file of `conf/` for a key and the name of its value.
        """
        values: dict[str, Value] = {}
        for config_field in _of_identity(config.__class__):
            value = getattr(config, config_field.name)
            name = getattr(value, "name", None) if is_dataclass(value) else None
            paths = {*(code_paths(config_field.name, name) if name else ()), *_default_paths(value.__class__)}
            values |= _leaves(config_field.name, _plain(value, paths))
        return cls(_REMOVED | values)

    @cached_property
    def digest(self) -> str:
        """Digest of the identity; equal exactly for equal identities."""
        return digest_of(self.values)

    def differences(self, other: "CellKey") -> dict[str, tuple[Value | None, Value | None]]:
        """Return the keys whose values differ, each with this value and the other one."""
        values, its = self.values, other.values
        keys = [key for key in dict.fromkeys([*values, *its]) if values.get(key) != its.get(key)]
        return {key: (values.get(key), its.get(key)) for key in keys}


def is_below(key: str, keys: Iterable[str]) -> bool:
    """Return whether a dotted key is one of these, or below one."""
    return f"{key}.".startswith(_with_dots(keys))


def _with_dots(keys: Iterable[str]) -> tuple[str, ...]:
    return tuple(f"{key}." for key in keys)


def digest_of(content: Any) -> str:
    """Return a short digest of JSON data."""
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def is_code_path(value: object) -> bool:
    """Return whether a value can be the dotted path of a function or class.

    >>> is_code_path("torch.optim.Adam"), is_code_path("auto"), is_code_path("0.1")
    (True, False, False)
    """
    return isinstance(value, str) and "." in value and all(map(str.isidentifier, value.split(".")))


def _plain(value: Any, paths: Collection[str]) -> Any:
    """Return a value in plain types, without nulls and these code paths: dataclasses become dicts of their
    fields that are part of the identity."""
    if is_dataclass(value):
        value = {
            config_field.name: getattr(value, config_field.name)
            for config_field in _of_identity(value.__class__)
        }
    if isinstance(value, dict):
        inside = {name: _plain(inner, paths) for name, inner in value.items()}
        return {
            name: inner
            for name, inner in inside.items()
            if inner not in (None, {}, []) and not (is_code_path(inner) and inner in paths)
        }
    if isinstance(value, list | tuple):
        return [_plain(inner, paths) for inner in value]
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)


def _leaves(key: str, value: Any) -> Iterator[tuple[str, Value]]:
    """Yield the values in plain types by their dotted keys."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _leaves(f"{key}.{name}", inner)
    elif isinstance(value, list):
        if value:
            yield key, json.dumps(value)
    elif value is not None:
        yield key, value


@cache
def _of_identity(kind: type[Any]) -> "list[Field[Any]]":
    """Return the fields of a dataclass that are part of the identity."""
    return [config_field for config_field in fields(kind) if not config_field.metadata.get(HOW_RUN)]


@cache
def _default_paths(kind: type[Any]) -> list[str]:
    """Return the code paths that are defaults of a class."""
    defaults = [config_field.default for config_field in fields(kind)] if is_dataclass(kind) else []
    return [str(default) for default in defaults if is_code_path(default)]
