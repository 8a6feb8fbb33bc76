"""The section of the page: the uninterrupted and the resumed run of each stop, step by step."""

from typing import TYPE_CHECKING

import pandas as pd

from dcpbench.analysis.frame import records
from dcpbench.records.row import dict_in

if TYPE_CHECKING:  # every page imports this module
    from dcpbench.plugins.script.judge import Verdict
    from dcpbench.plugins.script.record import Run

_MOST = 60
"""The most steps that are shown, around the first difference, or else the load."""


def timeline(frame: pd.DataFrame) -> tuple[str, pd.DataFrame] | None:
    """Return a line for each stop; None if no script was run."""
    lines = [
        {
            "stop": row["cell"].removeprefix("stop="),
            "verdict": row["verdict"],
            "run": dict_in(row["details"]).get("run", ""),
            "first difference": row["reason"] or "none",
        }
        for row in records(frame[frame["scenario"].eq("script")])
    ]
    title = "Resumed runs: . not run again, = equal, X first difference, x after it, | checkpoint"
    return (title, pd.DataFrame(lines)) if lines else None


def bar(reference: "Run", verdict: "Verdict") -> str:
    """Return a run with a character for each step: `....|....|==X`."""
    steps = reference.length
    loaded = steps if verdict.loaded is None else verdict.loaded
    first = verdict.first.step if verdict.first else steps + 1
    begin = max(1, (first if first <= steps else loaded + 1) - _MOST // 2)
    text = ""
    for step in range(begin, min(steps + 1, begin + _MOST)):
        text += "." if step <= loaded else "=" if step < first else "X" if step == first else "x"
        text += "|" * (step in reference.saved_steps)
    return text
