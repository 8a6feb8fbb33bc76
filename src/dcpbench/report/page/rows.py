"""What the page keeps of the rows, by columns: like values side by side pack about four times as well."""

import math
from dataclasses import dataclass
from typing import Any

import pandas as pd

from dcpbench.analysis.cell_identity import identity_keys, override_values
from dcpbench.analysis.frame import Sweeps, ok, records, short_names
from dcpbench.analysis.runs import commands
from dcpbench.core.checks import CHECKS
from dcpbench.core.metrics import METRICS
from dcpbench.core.mismatch import Mismatch, Problem
from dcpbench.core.sentences import describe
from dcpbench.records.row import AXES, columns
from dcpbench.records.store import RESULTS_JSONL
from dcpbench.verdict.sentences import short_reason

_POINTS = 200
_DIGITS = 10
_MISSED = 20
_SHORT = 300
_ENDING: tuple[str, ...] = ("rank", "doing", "phases")
_NOT_KEPT = ("schema_version", "config_dir", "cwd")


@dataclass(frozen=True)
class Limits:
    """How much of what may be long is kept of each row; `lines` of a log, `worst` mismatches of a check."""

    characters: int
    lines: int
    worst: int


LIMITS = (Limits(4000, 30, 5), Limits(1000, 10, 2), Limits(300, 0, 1))
"""From generous to terse."""


def compact(sweeps: Sweeps, limits: Limits) -> dict[str, Any]:
    """What the page is given, ready for JSON: the columns, what each of them is, and the environments."""
    frame = sweeps.frame
    labels = short_names([*frame["sweep"], *sweeps.environments])
    kept = [column for column in columns() if column not in _NOT_KEPT]
    rows = records(frame[kept])
    values = {column: [_clean(row[column], limits) for row in rows] for column in kept}
    values["sweep"] = [labels[sweep] for sweep in frame["sweep"]]
    values["ok"] = ok(frame).tolist()
    values["again"] = commands(frame)
    details = [_dict(value) for value in frame["details"]]
    values["short"] = [
        short_reason({**row, "details": of})[:_SHORT] for row, of in zip(rows, details, strict=True)
    ]
    values["losses"] = [_losses(one) for one in details]
    for name, of in (("check_details", _checks), ("ending", _ending)):
        values[name] = [_clean(of(one, limits), limits) for one in details]
    beside = {name: of for name, of in _axes_beside(frame).items() if name not in values}
    return {
        "axes": ["sweep", *AXES, *beside],
        "checks": [
            {"name": spec.name, "help": spec.help, "training": spec.training} for spec in CHECKS.values()
        ],
        "metrics": [
            {"name": spec.name, "unit": spec.unit, "help": spec.help, "headline": spec.history}
            for spec in METRICS.values()
        ],
        "columns": {**beside, **values},
        "environments": {
            labels[sweep]: _clean(known, limits) for sweep, known in sweeps.environments.items()
        },
        "left_out": [cut(sentence, limits.characters) for sentence in sweeps.left_out[:_MISSED]],
        "rows": len(frame),
    }


def cut(value: object, characters: int) -> str | None:
    """A text, shortened where it is longer than that; None for what is none."""
    if not isinstance(value, str):
        return None
    more = len(value) - characters
    return value if more <= 0 else f"{value[:characters]} ... ({more} more characters in {RESULTS_JSONL})"


def _axes_beside(frame: pd.DataFrame) -> dict[str, list[str | None]]:
    """The overrides that are part of what a cell is, no axis, and vary: by name, the value in each row."""
    keys = identity_keys(frame["overrides"], frame["config"])
    asked = [override_values(one) for one in frame["overrides"]]
    names = dict.fromkeys(name for one in asked for name in one if name in keys)
    values = {name: [one.get(name) for one in asked] for name in names}
    return {name: of for name, of in values.items() if len(set(of)) > 1}


def _dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _clean(value: Any, limits: Limits) -> Any:
    """A value of JSON with long texts cut, and null for a number beyond every float."""
    if isinstance(value, str):
        return cut(value, limits.characters)
    if isinstance(value, dict):
        return {key: _clean(item, limits) for key, item in value.items()}
    if isinstance(value, list):
        return [_clean(item, limits) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _checks(details: dict[str, Any], limits: Limits) -> dict[str, Any]:
    """Of each check how many names its control looked at, which it missed, and the worst mismatches."""
    return {
        name: {
            "names": len(_dict(seen.get("control"))),
            "missed_count": len(missed := _list(seen.get("control_missed"))),
            "missed": missed[:_MISSED],
            "mismatches": seen.get("mismatch_count"),
            "worst": [_described(one) for one in _list(seen.get("worst"))[: limits.worst]],
        }
        for name, seen in _dict(details.get("checks")).items()
        if isinstance(seen, dict)
    }


def _described(finding: object) -> object:
    """Add to a finding a sentence that says what is wrong, `what`."""
    if not isinstance(finding, dict):
        return finding
    try:
        known = Mismatch(
            str(finding.get("name")),
            Problem(str(finding.get("problem"))),
            max_abs_diff=finding.get("max_abs_diff"),
            facts=finding,
        )
        return {**finding, "what": describe(known)}
    except (KeyError, StopIteration, TypeError, ValueError):  # not as this version writes them
        return {**finding, "what": str(finding.get("problem"))}


def _losses(details: dict[str, Any]) -> list[dict[str, Any]]:
    """The first rank's losses: the uninterrupted run, its twin, and each run that was resumed at a step."""
    rank = _dict(next(iter(_list(details.get("ranks"))), None))
    resumed = _dict(rank.get("resumed")).items()
    curves = [_curve(name, 1, values) for name, values in _dict(rank.get("losses")).items()]
    curves += [_curve("resumed", int(step) + 1, values) for step, values in resumed if str(step).isdigit()]
    return [curve for curve in curves if curve["losses"]]


def _curve(name: str, first: int, values: object) -> dict[str, Any]:
    """Every n-th loss from step `first` on, few enough to draw; `every` is n."""
    losses = list(map(_rounded, _list(values)))
    every = max(1, math.ceil(len(losses) / _POINTS))
    return {"name": name, "first": first, "every": every, "losses": losses[::every]}


def _rounded(value: object) -> float | None:
    try:
        rounded = float(f"{value:.{_DIGITS}g}") if isinstance(value, int | float) else math.nan
    except OverflowError:  # an integer beyond every float
        return None
    return rounded if math.isfinite(rounded) else None


def _ending(details: dict[str, Any], limits: Limits) -> dict[str, Any]:
    """What is known of an end that no check made: of this try, and of the first one."""
    known: dict[str, Any] = {key: details[key] for key in _ENDING if key in details}
    known |= _tail(details, limits)
    first = details.get("first_try")
    if isinstance(first, dict):
        known["first_try"] = {key: first[key] for key in first if key != "log_tail"} | _tail(first, limits)
    return known


def _tail(of: dict[str, Any], limits: Limits) -> dict[str, Any]:
    lines = _list(of.get("log_tail"))[-limits.lines :] if limits.lines else []
    return {"log_tail": [cut(str(line), limits.characters // 10) for line in lines]} if lines else {}
