"""The section of the page. Every page imports this module, so it imports no comparison."""

import pandas as pd

from dcpbench.analysis.frame import records
from dcpbench.records.row import dict_in


def timeline(frame: pd.DataFrame) -> tuple[str, pd.DataFrame] | None:
    """Return a line for each stop; None if no script was run."""
    lines = [
        {
            "stop": row["cell"].removeprefix("stop="),
            "verdict": row["verdict"],
            "run": dict_in(row["details"]).get("run", ""),
            "reason": row["reason"],
        }
        for row in records(frame[frame["scenario"].eq("script")])
    ]
    title = "Resumed runs: . not run again, = equal, X first difference, x after it, | checkpoint"
    return (title, pd.DataFrame(lines)) if lines else None
