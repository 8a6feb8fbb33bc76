"""Values that a row can hold. A cell runs users' code, which can report anything: an array's scalar, a
number of 400 digits, a set. JSON has none of them, and one would cost the row.

Each is replaced by its text, or by null where a number is expected or it has no text. The row lists the
replaced values.
"""

import reprlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any

from dcpbench.core.metrics import Measurement
from dcpbench.core.mismatch import Mismatch
from dcpbench.core.rank_report import CheckReport, RankReport

_INTEGERS = range(-(2**63), 2**64)
_shortened = reprlib.Repr()
_shortened.maxother = _shortened.maxstring = 200


@dataclass(frozen=True)
class ColumnType:
    """The type of a column's values: exactly JSON's types, true is not a number; and null if `optional`."""

    python: type
    optional: bool = True

    def fits(self, value: Any) -> bool:
        """Return whether a column of this type can store a value."""
        if value is None:
            return self.optional
        kind = type(value)
        if self.python is float:
            return kind in (float, int) and -sys.float_info.max <= value <= sys.float_info.max
        return kind is self.python and (self.python is not int or -(2**63) <= value < 2**63)


_NUMBER, _FLAG = ColumnType(float), ColumnType(bool)


@dataclass
class Replacing:
    """Makes values plain, and notes each that it has replaced."""

    replaced: dict[str, None] = field(default_factory=dict)

    def value(self, value: Any, at: str) -> Any:
        """The value, of JSON's own types; tuples stay tuples, and NaN stays NaN."""
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return self.text(value, at)
        if isinstance(value, float):
            return float.__float__(value)
        if isinstance(value, int) and int.__int__(value) in _INTEGERS:
            return int.__int__(value)
        if isinstance(value, dict):
            return {key: self.value(one, f"{at}.{key}") for key, one in self._items(value, at)}
        if isinstance(value, list | tuple):
            items = [self.value(one, at) for one in value]
            return tuple(items) if isinstance(value, tuple) else items
        return self.instead(value, at)

    def text(self, value: Any, at: str) -> str:
        """The value, where it has to be a text."""
        return str.__str__(value) if isinstance(value, str) else str(self.instead(value, at))

    def column(self, value: Any, kind: ColumnType, at: str) -> Any:
        """The value, or None where a column of this kind cannot hold it; NaN and the infinities stay."""
        plain = self.value(value, at)
        if kind.fits(plain) or (kind.python is float and isinstance(plain, float)):
            return plain
        if plain is not None:
            self._note(value, at)
        return None

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

    def _items(self, value: dict[Any, Any], at: str) -> Iterator[tuple[Any, Any]]:
        """A dict's keys and values; JSON writes keys that are whole numbers as texts."""
        for key, one in dict.items(value):
            yield self.value(key, at) if isinstance(key, int) else self.text(key, at), one

    def mismatch(self, mismatch: Mismatch, at: str) -> Mismatch:
        """A mismatch of a check."""
        name = self.text(mismatch.name, at)
        at = f"{at}: {name}"
        return replace(
            mismatch,
            name=name,
            where=self.text(mismatch.where, at),
            kind=self._optional_text(mismatch.kind, at),
            by=self._optional_text(mismatch.by, at),
            max_abs_diff=self.column(mismatch.max_abs_diff, _NUMBER, f"{at}.max_abs_diff"),
            facts={self.text(key, at): self.value(one, f"{at}.{key}") for key, one in mismatch.facts.items()},
            sides=mismatch.sides and (self.text(mismatch.sides[0], at), self.text(mismatch.sides[1], at)),
        )

    def check(self, seen: CheckReport, at: str) -> CheckReport:
        """A rank's report of a check, which has most mismatches in several places."""
        known = {id(one): one for one in [seen.first, *seen.distinct.values()] if one}
        plain = {number: self.mismatch(one, at) for number, one in known.items()}
        return replace(
            seen,
            first=plain[id(seen.first)] if seen.first else None,
            distinct={alike: plain[id(one)] for alike, one in seen.distinct.items()},
            compared=self._flags(seen.compared, at),
            control=self._flags(seen.control, at),
        )

    def measurement(self, one: Measurement) -> Measurement | None:
        """A measurement; None if it is not a finite number."""
        metric = self.text(one.metric, "a metric")
        value = self.column(one.value, _NUMBER, metric)
        if not _NUMBER.fits(value) or value is None:
            return None
        save = self.column(one.save, ColumnType(int), metric)
        return replace(
            one, metric=metric, value=value, phase=self._optional_text(one.phase, metric), save=save
        )

    def _flags(self, places: dict[str, dict[str, bool]], at: str) -> dict[str, dict[str, bool]]:
        """Flags by place and name; values that are neither true nor false count as false."""
        return {
            self.text(place, at): {
                self.text(name, at): bool(self.column(one, _FLAG, f"{at}: {name}"))
                for name, one in names.items()
            }
            for place, names in places.items()
        }

    def _optional_text(self, value: Any, at: str) -> str | None:
        return None if value is None else self.text(value, at)


def plain_report(report: RankReport) -> RankReport:
    """A rank's report that the driver can read and put into a row; `replaced` names the changed values."""
    replacing = Replacing()
    typed = ("rank", "checks", "measurements", "replaced")
    rest = {item.name: getattr(report, item.name) for item in fields(report) if item.name not in typed}
    measured = [replacing.measurement(one) for one in report.measurements]
    plain = replace(
        report,
        checks={
            replacing.text(check, "a check"): replacing.check(one, check)
            for check, one in report.checks.items()
        },
        measurements=[one for one in measured if one],
        **{name: replacing.value(value, name) for name, value in rest.items()},
    )
    return replace(plain, replaced=[*replacing.replaced])
