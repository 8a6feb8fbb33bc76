"""What changed between two sweeps: verdicts first, then the costs of the cells in both."""

import argparse
from pathlib import Path

import pandas as pd

from dcpbench.report.frame import AXES, read_frame
from dcpbench.results import PASSING

_KEY = [*AXES, "overrides"]
_COSTS = ["save_s", "save_stall_s", "load_s"]


def main(arguments: list[str]) -> int:
    """Compare two sweeps.

    Raises:
        dcpbench.results.ResultsError: one of the folders holds no results.
    """
    compare = argparse.ArgumentParser(prog="python -m dcpbench.report compare")
    compare.add_argument("old", type=Path, help="folder of the sweep to compare with")
    compare.add_argument("new", type=Path, help="folder of the sweep to judge")
    both = compare.parse_args(arguments)
    print_comparison(both.old, both.new)
    return 0


def changes(old: pd.DataFrame, new: pd.DataFrame) -> pd.DataFrame:
    """One row for each cell of either sweep: `old` and `new` status, and what kind of change it is.

    Cells are matched by their axes and overrides. `change` is one of newly failing, newly passing,
    vanished, new, same.
    """
    both = old[[*_KEY, "cell", "status"]].merge(
        new[[*_KEY, "cell", "status"]], on=_KEY, how="outer", suffixes=("_old", "_new")
    )
    return pd.DataFrame(
        {
            "cell": both["cell_new"].fillna(both["cell_old"]),
            "old": both["status_old"].fillna("-"),
            "new": both["status_new"].fillna("-"),
            "change": [
                _change(before, after)
                for before, after in zip(both["status_old"], both["status_new"], strict=True)
            ],
        }
    )


def costs(old: pd.DataFrame, new: pd.DataFrame) -> pd.DataFrame:
    """Median seconds over the cells that both sweeps measured, and their ratio (new / old)."""
    both = old.merge(new, on=_KEY, suffixes=("_old", "_new"))
    lines = []
    for cost in _COSTS:
        measured = both[[f"{cost}_old", f"{cost}_new"]].dropna()
        before, after = measured.median() if len(measured) else (float("nan"), float("nan"))
        lines.append((cost, len(measured), before, after, after / before if before else float("nan")))
    return pd.DataFrame(lines, columns=["metric", "cells", "old", "new", "ratio"])


def print_comparison(old: Path, new: Path) -> None:
    """Print what changed from one sweep to another.

    Raises:
        dcpbench.results.ResultsError: one of the folders holds no results.
    """
    (before, _), (after, _) = read_frame(old), read_frame(new)
    changed = changes(before, after)
    moved = changed[(changed["old"] != changed["new"])]
    if len(moved):
        print(moved.to_string(index=False))
    print(f"{len(changed)} cells, {len(moved)} with another status")
    print(costs(before, after).to_string(index=False, float_format=lambda value: f"{value:.3g}"))
    print("One run on each side says nothing about noise: a ratio here is no verdict on speed.")


def _change(before: object, after: object) -> str:
    if not isinstance(before, str):
        return "new"
    if not isinstance(after, str):
        return "vanished"
    if (before in PASSING) == (after in PASSING):
        return "same" if before == after else "other status"
    return "newly failing" if before in PASSING else "newly passing"
