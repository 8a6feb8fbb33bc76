"""Values that a row can hold. A cell runs users' code, which can report anything: an array's scalar, a
number of 400 digits, a set. JSON has none of them, and one would cost the row.

Each is replaced by its text, or by null where a number is expected or it has no text. The row lists the
replaced values.
"""

import math
import reprlib
import sys
from dataclasses import dataclass, field, is_dataclass, replace
from functools import cache
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from dcpbench.core.metrics import Measurement
from dcpbench.core.mismatch import Mismatch, Place, Problem
from dcpbench.core.rank_report import CheckReport, RankReport

_INTEGERS = range(-(2**63), 2**64)
_shortened = reprlib.Repr()
_shortened.maxother = _shortened.maxstring = 200


@dataclass(frozen=True)
class ColumnType:
    """The type of a column's values: exactly JSON's types, true is not a number; and null if `optional`."""

    python: type
    optional: bool = True

    @classmethod
    def of(cls, hint: Any) -> "ColumnType | None":
        """Return the type that a type hint names: bool, int, float or str, or one of them or None; else
        None."""
        python, *none = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        return cls(python, optional=bool(none)) if python in (bool, int, float, str) else None

    def fits(self, value: Any) -> bool:
        """Return whether a column of this type can store a value."""
        if value is None:
            return self.optional
        kind = type(value)
        if self.python is float:
            return kind in (float, int) and -sys.float_info.max <= value <= sys.float_info.max
        return kind is self.python and (self.python is not int or -(2**63) <= value < 2**63)


_NUMBER = ColumnType(float, optional=False)


@dataclass
class Replacing:
    """Makes values plain, and notes each that it has replaced. With `as_json` a number that is not finite
    becomes null, which the check that found it says, and half of a surrogate pair a question mark."""

    as_json: bool = False
    replaced: dict[str, None] = field(default_factory=dict)

    def value(self, value: Any, at: str, hint: Any = None) -> Any:
        """The value, of JSON's own types, and a number, flag or text where its type hint says so. Tuples stay
        tuples, dataclasses that the hint names stay dataclasses, and NaN stays NaN."""
        kind = ColumnType.of(hint)
        if kind and kind.python is not str:
            return self.column(value, kind, at)
        if kind and not isinstance(value, str | None):
            return str(self.instead(value, at))
        if value is None or isinstance(value, bool | Problem):
            return value
        if isinstance(value, str):
            text = str.__str__(value)
            return text.encode(errors="replace").decode() if self.as_json else text
        if isinstance(value, float):
            return None if self.as_json and not math.isfinite(value) else float.__float__(value)
        if isinstance(value, int) and int.__int__(value) in _INTEGERS:
            return int.__int__(value)
        if isinstance(value, dict):
            of_key, of_item = get_args(hint) or (str, None)
            places = {key: at if type(key) is tuple else f"{at}.{key}" for key in dict.keys(value)}
            items = dict.items(value)
            return {
                self._key(key, at, of_key): self.value(inner, places[key], of_item) for key, inner in items
            }
        if isinstance(value, Place):
            return Place(*(self.value(inner, at, hint) for inner, hint in zip(value, _PLACE, strict=True)))
        if isinstance(value, list | tuple):
            made = [self.value(inner, at, *get_args(hint)[:1]) for inner in value]
            return tuple(made) if isinstance(value, tuple) else made
        declared: Any = next(filter(is_dataclass, (hint, *get_args(hint))), None)
        if declared and isinstance(value, declared):
            return self._fields(value, at, _hints(declared))
        return self.instead(value, at)

    def column(self, value: Any, kind: ColumnType, at: str) -> Any:
        """The value, or None where a column of this kind cannot hold it, False if it is a flag that cannot be
        null; NaN and the infinities stay."""
        plain = self.value(value, at)
        if kind.fits(plain) or (kind.python is float and isinstance(plain, float)):
            return plain
        if plain is not None:
            self._note(value, at)
        return False if kind == ColumnType(bool, optional=False) else None

    def instead(self, value: Any, at: str) -> str | None:
        """The text of a value that is not plain, shortened; None if it has none."""
        self._note(value, at)
        try:
            return _shortened.repr(value)
        except Exception:  # noqa: BLE001 - __repr__ may be anybody's
            return None

    def _note(self, value: Any, at: str) -> None:
        kind = type(value)
        name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
        self.replaced[f"{at} ({name})"] = None

    def _key(self, key: Any, at: str, hint: Any) -> Any:
        """A key of a dict; JSON writes whole numbers as texts."""
        as_it_is = isinstance(key, int | Place) or get_origin(hint) is tuple
        return self.value(key, at, None if as_it_is else str)

    def _fields(self, value: Any, at: str, hints: dict[str, Any]) -> Any:
        """A dataclass with plain values; a mismatch is noted under its check and name, a measurement under
        its metric."""
        if isinstance(value, Mismatch):
            at = f"{at}: {self.value(value.name, at, str)}"
        elif isinstance(value, Measurement):
            at = self.value(value.metric, "a metric", str)
        plain = {name: self.value(getattr(value, name), at, hint) for name, hint in hints.items()}
        return replace(value, **plain)


_hints = cache(get_type_hints)
_PLACE = (*_hints(Place).values(),)


def plain_report(report: RankReport) -> RankReport:
    """A rank's report that the driver can read and put into a row; `replaced` names the changed values. A
    measurement that is not a finite number is left out."""
    replacing = Replacing()
    plain = {
        name: replacing.value(getattr(report, name), name, hint)
        for name, hint in _hints(RankReport).items()
        if name not in ("checks", "replaced")
    }
    plain["checks"] = {
        name: replacing.value(check, name, CheckReport) for name, check in report.checks.items()
    }
    plain["measurements"] = [
        measurement for measurement in plain["measurements"] if _NUMBER.fits(measurement.value)
    ]
    return replace(report, **plain, replaced=[*replacing.replaced])
