"""Selection of rows by conditions like `status!=pass` or `save_s>=0.1`, which are parsed, not evaluated."""

import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from dcpbench.analysis.frame import dtypes, is_true
from dcpbench.config.text import choices, did_you_mean
from dcpbench.core.metrics import METRICS
from dcpbench.core.statuses import STATUSES
from dcpbench.records.row import NESTED
from dcpbench.records.store import ResultsError

_FORM = re.compile(r"\s*([A-Za-z_]\w*)\s*(!=|<=|>=|==|=|<|>|~)\s*(.*?)\s*", re.DOTALL)
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
_ORDER: dict[str, Any] = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}


class QueryError(ResultsError):
    """An option has a wrong value; the message is one line with the alternatives."""


def queryable() -> dict[str, str]:
    """Return the columns that conditions can name, and their dtypes."""
    return {"sweep": "string", **{name: dtype for name, dtype in dtypes().items() if name not in NESTED}}


@dataclass(frozen=True)
class Condition:
    """A condition on one column; the value None is null."""

    column: str
    operator: str
    value: str | float | bool | re.Pattern[str] | None

    def holds(self, frame: pd.DataFrame) -> "pd.Series[bool]":
        """Tell which rows meet the condition. A missing value equals only null, and is not less or more."""
        column = frame[self.column]
        if isinstance(self.value, re.Pattern):
            pattern = self.value
            matches = column.fillna("").map(lambda text: pattern.search(text) is not None)
            return matches.astype(bool) & column.notna()
        if self.operator in _ORDER:
            return is_true(_ORDER[self.operator](column, self.value))
        same = column.isna() if self.value is None else is_true(column.eq(self.value))
        return same if self.operator == "=" else ~same


def parse_condition(condition: str) -> Condition:
    """Parse a condition: a column, one of = != < <= > >= ~ (a regular expression is searched for), and a
    value: true, false, null, a number or a text, in double quotes if it is one of these words."""
    form = _FORM.fullmatch(condition)
    if not form:
        expected = "a column, one of = != < <= > >= ~ and a value, like status!=pass"
        raise QueryError(f"--where {condition!r}: expected {expected}")
    name, sign, text = form.groups()
    column, sign = known_column(name, "--where"), "=" if sign == "==" else sign
    wanted = _pattern(condition, column, text) if sign == "~" else _value(condition, column, text)
    if sign in _ORDER and (wanted is None or queryable()[column] == "boolean"):
        raise QueryError(f"--where {condition!r}: {text} has no order; use = or !=")
    return Condition(column, sign, wanted)


def select_rows(frame: pd.DataFrame, conditions: Sequence[Condition]) -> pd.DataFrame:
    """Return the rows that meet all conditions; raise QueryError for a text that no row has."""
    for condition in conditions if len(frame) else ():
        _refuse_unknown_value(frame[condition.column], condition)
    for condition in conditions:
        frame = frame[condition.holds(frame)]
    return frame.reset_index(drop=True)


def split_names(options: Sequence[str]) -> list[str]:
    """Return the names in an option, which can be repeated and can list several between commas."""
    return [name.strip() for names in options for name in names.split(",") if name.strip()]


def known_column(name: str, option: str) -> str:
    """Return the name of a column; raise QueryError with the alternatives if there is no such column."""
    known = queryable()
    if name in known:
        return name
    raise QueryError(f"{option}: no column {name!r}{choices(name, known)}")


def known_metric(name: str) -> str:
    """Return the name of a column of numbers; raise QueryError if it is not one."""
    known = queryable()
    if known.get(name) in ("float64", "Int64"):
        return name
    metrics = [column for column, dtype in known.items() if dtype == "float64" or column in METRICS]
    raise QueryError(f"--metric: {name} is not a metric{choices(name, metrics)}")


def _refuse_unknown_value(column: "pd.Series[str]", condition: Condition) -> None:
    """Raise QueryError for a text that no row has; with `!=` only if another text is close to it."""
    text = condition.value
    if not isinstance(text, str) or not text or condition.operator not in ("=", "!="):
        return
    there = sorted(column.dropna().unique())
    known = [*dict.fromkeys([*STATUSES, *there])] if condition.column == "status" else there
    if text not in known and (condition.operator == "=" or did_you_mean(text, known)):
        given = f"{condition.column}{condition.operator}{text}"
        raise QueryError(f"--where {given}: no row has that {condition.column}{choices(text, known)}")


def _pattern(given: str, column: str, text: str) -> re.Pattern[str]:
    if queryable()[column] != "string":
        raise QueryError(f"--where {given!r}: {column} is not a text; ~ searches only texts")
    try:
        return re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise QueryError(f"--where {given!r}: invalid regular expression: {error}") from None


def _value(given: str, column: str, text: str) -> str | float | bool | None:
    if text == "null":
        return None
    dtype = queryable()[column]
    if dtype == "string":
        return text[1:-1] if len(text) > 1 and text[0] == text[-1] == '"' else text
    if dtype == "boolean":
        if text not in ("true", "false"):
            raise QueryError(f"--where {given!r}: {column} is true, false or null")
        return text == "true"
    if not _NUMBER.fullmatch(text):
        raise QueryError(f"--where {given!r}: {column} is a number or null, not {text!r}")
    return int(text) if len(text) < 19 and text.lstrip("+-").isdecimal() else float(text)
