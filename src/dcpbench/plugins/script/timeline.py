"""The section of the page: the uninterrupted and the resumed run of each stop, step by step."""

from typing import Any

import pandas as pd

from dcpbench.analysis.frame import records
from dcpbench.records.row_reader import dict_in, list_in

_MOST = 60


def timeline(frame: pd.DataFrame) -> tuple[str, pd.DataFrame] | None:
    """Return a line for each stop; None if no script was run."""
    rows = [row for row in records(frame[frame["scenario"].eq("script")]) if row.get("verdict")]
    lines = [
        {
            "stop": row["cell"].removeprefix("stop="),
            "verdict": row["verdict"],
            "run": bar(row),
            "first difference": row["reason"] or "none",
        }
        for row in rows
    ]
    title = "Resumed runs: . not run again, = equal, X first difference, x after it, | checkpoint"
    return (title, pd.DataFrame(lines)) if lines else None


def bar(row: dict[str, Any]) -> str:
    """Return a run with a character for each step, or for several: `....|....|==X`."""
    known = dict_in(dict_in(row["details"]).get("script"))
    steps, saves = known.get("steps") or 0, {*list_in(known.get("saves"))}
    loaded = steps if row["loaded_step"] is None else row["loaded_step"]
    first = row["first_step"] or steps + 1
    signs = [
        "." if step <= loaded else "X" if step == first else "x" if step > first else
        "=" if step <= (known.get("last") or 0) else " "
        for step in range(1, steps + 1)
    ]  # fmt: skip
    each = -(-steps // _MOST) or 1
    text = ""
    for begin in range(0, steps, each):
        several = signs[begin : begin + each]
        text += "X" if "X" in several else several[0]
        text += "|" * (not saves.isdisjoint(range(begin + 1, begin + 1 + each)))
    return text
