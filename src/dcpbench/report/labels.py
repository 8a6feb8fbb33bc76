"""How values and columns are written in a table."""

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from dcpbench.analysis.frame import as_text
from dcpbench.config.text import clipped, size_text
from dcpbench.core.checks import CHECKS
from dcpbench.core.metrics import METRICS

_FAILED, _TRAINING = "failed: ", "training failed: "


def plain(value: object) -> str:
    """Return the value of an axis as text, at most 80 characters of it."""
    return clipped(as_text(value), 80)


def checks_text(checks: Mapping[str, bool | None]) -> str:
    """Name the first failed check of a cell and count the others, those of training separately; or count
    those that passed."""
    failed = [check for check, passed in checks.items() if passed is False]
    passed = sum(value is True for value in checks.values())
    if not failed:
        return f"{passed} passed" if passed else "-"
    training = [check for check in failed if CHECKS[check].training]
    resume = [check for check in failed if check not in training]
    of_kinds = ((_FAILED, resume), (_TRAINING, training))
    counts = {kind: f", +{len(names) - 1}" if len(names) > 1 else "" for kind, names in of_kinds}
    return "; ".join(f"{kind}{names[0]}{counts[kind]}" for kind, names in of_kinds if names)


def has_failed(text: str) -> bool:
    """Tell whether `checks_text` names failed checks."""
    return text.startswith((_FAILED, _TRAINING))


def quantity(metric: str, value: float) -> str:
    """Return a value of a metric with its unit; `-` if it was not measured."""
    unit = METRICS[metric].unit if metric in METRICS else ""
    if pd.isna(value):
        return "-"
    if unit == "s":
        return f"{value:#.3g} s" if value < 1 else f"{value:.3f} s"
    if unit == "bytes":
        return size_text(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def entry(metric: str, value: Any) -> str:
    """Return a value of a metric for a separate column: seconds without their unit, others with it."""
    if METRICS[metric].unit != "s":
        return quantity(metric, value)
    return "-" if pd.isna(value) else f"{value:.3f}"


def change_style(metric: str, ratio: float) -> str:
    """Return the style of a change: red if it is worse, green if it is better, none if it is neither."""
    better = METRICS[metric].better if metric in METRICS else "lower"
    if better is None or math.isnan(ratio):
        return ""
    return "red" if (ratio > 1) == (better == "lower") else "green"
