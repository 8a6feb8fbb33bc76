"""How values and columns are written in a table: short, and never longer than a line can be."""

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


def narrowed(table: pd.DataFrame) -> pd.DataFrame:
    """A results table for a narrow terminal: one column tells how many checks held, or did not."""
    checks = [column for column in table.columns if column in SHORT.values()]
    if not checks:
        return table
    marks = table[checks]
    made, broken = (marks != "-").sum(axis=1), (marks == "NO").sum(axis=1)
    told = [f"{no}/{all_} NO" if no else f"{all_} held" for no, all_ in zip(broken, made, strict=True)]
    folded = table.drop(columns=checks)
    folded.insert(list(table.columns).index(checks[0]), "checks", told)
    if "runs" in folded:
        folded["runs"] = folded["runs"].str.removesuffix(" runs").str.replace(" of ", "/")
    return folded.rename(columns={"save_stall_s": "save_\nstall_s"})
