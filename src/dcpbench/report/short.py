"""How values and columns are written in a table: short, and never longer than a line can be."""

from collections.abc import Hashable

import pandas as pd

SHORT = {
    "model_equal": "model=",
    "optim_equal": "optim=",
    "extra_equal": "extra=",
    "loss_resume_equal": "resume=",
    "loss_twin_close": "twin loss~",
    "state_twin_close": "twin state~",
    "loss_resume_close": "resume~",
    "contract_held": "contract",
    "checkpoint_whole": "whole",
    "save_harmless": "harmless",
}
"""What a check is called at the head of its column."""


def plain(value: object) -> str:
    """The value of an axis."""
    if value is None or value is pd.NA or value != value:
        return "-"
    return str(value).lower() if pd.api.types.is_bool(value) else clipped(str(value), 80)


def mark(value: object) -> str:
    """What a check came to: yes, NO, or `-` where it did not apply."""
    if not pd.api.types.is_bool(value):
        return "-"
    return "yes" if value else "NO"


def seconds(value: float) -> str:
    """A time, to the millisecond."""
    return "-" if pd.isna(value) else f"{value:.3f}"


def clipped(text: str, length: int) -> str:
    """A text, and what it lacks if it is too long to be read."""
    return text if len(text) <= length else f"{text[:length]}... ({len(text):,} characters)"


def fold_checks(table: pd.DataFrame) -> pd.DataFrame:
    """A results table with one column that tells which checks did not hold, for where they have no room."""
    checks = [column for column in table.columns if column in SHORT.values()]
    if not checks:
        return table
    told = [
        f"NO: {', '.join(broken)}" if (broken := _with(line, "NO")) else f"{len(_with(line, 'yes'))} held"
        for line in table[checks].to_dict("records")
    ]
    folded = table.drop(columns=checks)
    folded.insert(int(table.columns.get_loc(checks[0])), "checks", told)  # type: ignore[arg-type]
    return folded


def _with(line: dict[Hashable, str], value: str) -> list[str]:
    return [str(check) for check, came_to in line.items() if came_to == value]
