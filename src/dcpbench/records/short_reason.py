"""One line for the reason of a row."""

import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from dcpbench.core.checks import CHECKS
from dcpbench.core.mismatch import Problem
from dcpbench.core.sentences import described
from dcpbench.records.row_reader import dict_in, list_in
from dcpbench.verdict.sentences import OBSERVED, UNLISTED

_LONGEST = 80
"""The most characters of values that have no distance, such as infinity."""


def short_reason(row: Mapping[str, Any]) -> str:
    """Shorten the reason of a flat row to one line: the first check that failed, its worst mismatch, a number
    and a rank; for a known failure its id; otherwise the start of the reason. The line starts with
    `training: ` if only checks of training failed.

    >>> worst = {"name": "net1.weight", "problem": "differs", "max_abs_diff": 0.01, "rank": 2}
    >>> details = {"checks": {"model_equal": {"worst": [worst], "mismatch_count": 3}}}
    >>> short_reason({"status": "fail", "model_equal": False, "reason": "…", "details": details})
    'model_equal: net1.weight differs by 0.01, rank 2 (+2 more)'
    """
    reason = str(row.get("reason") or "")
    failed = [check for check in CHECKS if row.get(check) is False and not CHECKS[check].training]
    training = [check for check in CHECKS if row.get(check) is False and CHECKS[check].training]
    if not failed:
        failed, training = training, []
    if row.get("status") == "xfail":
        return reason.partition(":")[0]
    if reason.startswith(UNLISTED):
        return reason.partition(OBSERVED)[0]
    if row.get("status") != "fail" or not failed:
        return reason.partition(" (before that ")[0].partition("; stacks are ")[0]
    details = dict_in(dict_in(dict_in(row.get("details")).get("checks")).get(failed[0]))
    found = [one for one in map(dict_in, list_in(details.get("worst"))) if one]
    if not found:
        return reason
    worst = max(found, key=_distance)
    problem = str(worst.get("problem", Problem.differs))
    differs = problem in (Problem.differs, Problem.value, Problem.far)
    how = "differs" if differs else problem.replace("_", " ")
    distance, values = _distance(worst), described(worst)
    text = f"{failed[0]}: {worst.get('name')}"
    if math.isfinite(distance) or len(values) > _LONGEST or "actual" not in worst:
        text += f" {how} by {distance:.3g}" if math.isfinite(distance) else f" {how}"
    else:
        text += f": {values}"
    text += f", rank {worst['rank']}" if "rank" in worst else ""
    more = details.get("mismatch_count")
    text += f" (+{more - 1} more)" if isinstance(more, int) and more > 1 else ""
    text += f", also {', '.join(failed[1:])}" if failed[1:] else ""
    text += f"; training: {', '.join(training)}" if training else ""
    return f"training: {text}" if CHECKS[failed[0]].training else text


def _distance(mismatch: Mapping[str, Any]) -> float:
    """Return the largest difference of a mismatch; anything without one (a missing key) is the worst."""
    distance = mismatch.get("max_abs_diff")
    with suppress(OverflowError):
        return math.inf if not isinstance(distance, int | float) or distance != distance else float(distance)
    return math.inf
