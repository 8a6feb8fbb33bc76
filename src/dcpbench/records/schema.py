"""What the columns of a row may hold, and what of a row that was read does not fit."""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints


@dataclass(frozen=True)
class ColumnType:
    """What a column may hold: JSON's own types exactly, as true is no number; null if it is `optional`."""

    python: type
    name: str
    holds: Callable[[Any], bool]
    optional: bool = False

    @property
    def or_null(self) -> "ColumnType":
        """The same, or null."""
        return replace(self, optional=True)

    def fits(self, value: Any) -> bool:
        """Whether a column of this type may hold this value."""
        return (value is None and self.optional) or self.holds(value)


def _is_number(value: Any) -> bool:
    return type(value) in (float, int) and -sys.float_info.max <= value <= sys.float_info.max


YES_OR_NO = ColumnType(bool, "true or false", lambda value: type(value) is bool)
INTEGER = ColumnType(
    int, "an integer of 64 bits", lambda value: type(value) is int and -(2**63) <= value < 2**63
)
NUMBER = ColumnType(float, "a finite number", _is_number)
TEXT = ColumnType(str, "a text", lambda value: type(value) is str)
OBJECT = ColumnType(dict, "an object", lambda value: type(value) is dict)
_BY_TYPE = {one.python: one for one in (YES_OR_NO, INTEGER, NUMBER, TEXT, OBJECT)}


def column_types_of(row: type) -> dict[str, ColumnType]:
    """Those of a dataclass whose fields are bool, int, float, str or a mapping, or one of them or None."""
    return {name: _column_type(hint) for name, hint in get_type_hints(row).items()}


def _column_type(hint: Any) -> ColumnType:
    alternatives = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    known = _BY_TYPE.get(get_origin(alternatives[0]) or alternatives[0], OBJECT)
    return known.or_null if type(None) in alternatives else known


def misfits(row: Mapping[str, Any], types: Mapping[str, ColumnType], required: tuple[str, ...]) -> list[str]:
    """The columns that hold what they may not, or that every row has and this one does not.

    A column that is missing and not required is one of a newer row.
    """
    return [
        name
        for name, kind in types.items()
        if (name in row or name in required) and not kind.fits(row.get(name))
    ]


def value_text(value: object) -> str:
    """A value in a sentence, whatever and however long it is."""
    if isinstance(value, list | dict):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    if isinstance(value, int) and abs(value) >= 10**20:
        return "a huge number"
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:50]}... ({len(text):,} characters)"
