"""The section of the page: the uninterrupted and the resumed run of each stop, step by step."""

from typing import Any

import pandas as pd

from dcpbench.analysis.frame import records
from dcpbench.records.row_reader import dict_in, list_in

_MOST = 60


def timeline(frame: pd.DataFrame) -> tuple[str, pd.DataFrame] | None:
    """Return a line for each stop; None if no script was run."""
    rows = [row for row in records(frame[frame["scenario"].eq("script")]) if row.get("verdict")]
    if not rows:
        return None
    table = pd.DataFrame(
        {
            "stop": [row["cell"].removeprefix("stop=") for row in rows],
            "verdict": [row["verdict"] for row in rows],
            "run": [bar(row) for row in rows],
            "first difference": [row["reason"] or "none" for row in rows],
        }
    )
    return "Resumed runs: . not run again, = equal, X first difference, x after it, | checkpoint", table


def bar(row: dict[str, Any]) -> str:
    """Return a run with a character for each step, or for several: `....|....|==X`."""
    known = dict_in(dict_in(row["details"]).get("script"))
    steps, last = known.get("steps"), known.get("last")
    if not isinstance(steps, int) or steps < 1:
        return ""
    saves = {step for step in list_in(known.get("saves")) if isinstance(step, int)}
    loaded, first = row["loaded_step"], row["first_step"]
    each = -(-steps // _MOST)
    text = ""
    for begin in range(1, steps + 1, each):
        of = range(begin, min(begin + each, steps + 1))
        if loaded is None or begin <= loaded:
            text += "."
        elif first is not None and first in of:
            text += "X"
        elif first is not None and begin > first:
            text += "x"
        else:
            text += "=" if isinstance(last, int) and begin <= last else " "
        if saves.intersection(of):
            text += "|"
    return text
