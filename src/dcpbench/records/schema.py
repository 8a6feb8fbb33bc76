"""What the columns of a row may hold, taken from the types of a dataclass; and what of a row that was read
does not fit."""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from types import UnionType
from typing import Any, get_args, get_type_hints


def _is_number(value: Any) -> bool:
    return type(value) in (float, int) and -sys.float_info.max <= value <= sys.float_info.max


@dataclass(frozen=True)
class Kind:
    """What a column may hold: JSON's own types exactly, as true is no number."""

    python: type
    name: str
    holds: Callable[[Any], bool]


_KINDS = {
    bool: Kind(bool, "true or false", lambda value: type(value) is bool),
    int: Kind(int, "an integer of 64 bits", lambda value: type(value) is int and -(2**63) <= value < 2**63),
    float: Kind(float, "a finite number", _is_number),
    str: Kind(str, "a text", lambda value: type(value) is str),
    dict: Kind(dict, "an object", lambda value: type(value) is dict),
}


@dataclass(frozen=True)
class Columns:
    """The columns of a row: what each holds, which may be null as well, and which every row has."""

    kinds: Mapping[str, Kind]
    optional: frozenset[str]
    required: tuple[str, ...]

    @classmethod
    def of(cls, row: type) -> "Columns":
        """Those of a dataclass whose fields are bool, int, float, str or dict, or one of them or None."""
        hints = {name: _alternatives(hint) for name, hint in get_type_hints(row).items()}
        return cls(
            {name: _KINDS.get(types[0], _KINDS[dict]) for name, types in hints.items()},
            frozenset(name for name, types in hints.items() if type(None) in types),
            tuple(item.name for item in fields(row) if item.default is item.default_factory is MISSING),
        )

    def misfits(self, row: Mapping[str, Any]) -> list[str]:
        """The columns that hold what they may not, or that every row has and this one does not.

        A column that is missing and not required is one of a newer row.
        """
        return [
            name
            for name, kind in self.kinds.items()
            if not kind.holds(value := row.get(name)) and not (value is None and self._may_lack(row, name))
        ]

    def _may_lack(self, row: Mapping[str, Any], name: str) -> bool:
        return name in self.optional if name in row else name not in self.required


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if isinstance(hint, UnionType) else (hint,)


def told(value: object) -> str:
    """A value in a sentence, whatever and however long it is."""
    if isinstance(value, list | dict):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    if isinstance(value, int) and abs(value) >= 10**20:
        return "a huge number"
    said = json.dumps(value)
    return said if len(said) <= 60 else f"{said[:50]}... ({len(said):,} characters)"
