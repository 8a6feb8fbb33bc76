"""Which rows of different sweeps are runs of the same cell: by its axes, and by what else was overridden."""

import re
from collections.abc import Collection

import pandas as pd

from dcpbench.analysis.frame import AXES
from dcpbench.analysis.query import QueryError
from dcpbench.report.labels import plain

NOT_THE_CELL = frozenset(
    {
        "repeat",
        "repeats",
        "experiment",
        "retry",
        "sharing",
        "isolation",
        "raw",
        "known_failures",
        "keep_checkpoints",
        "storage.root",
        "storage.keep_free_bytes",
        "storage.needs_bytes",
    }
)
"""Overrides that say how often, how long or where a cell runs and not what it is; `timeouts.` too."""
_NEXT_OVERRIDE = re.compile(r"\s+(?=[+~]*[\w./@:-]+=)")


def with_cells(frame: pd.DataFrame, ignored: Collection[str] = ()) -> pd.DataFrame:
    """The rows with two columns more: `key`, equal for all runs of one cell in any sweep, and `others`, the
    overrides in it that no axis shows. Axes become text, `-` for none, and `repeat` a number.

    Args:
        ignored: axes and overrides by which cells are not to be told apart.
    """
    shown = frame.assign(**{axis: _as_text(frame[axis]) for axis in AXES})
    overrides = frame["overrides"].fillna("").astype(object)
    shown["others"] = overrides.map({text: other_overrides(text, ignored) for text in overrides.unique()})
    shown["repeat"] = frame["repeat"].fillna(0).astype(int)
    parts = [shown[axis] for axis in AXES if axis not in ignored] + [shown["others"]]
    shown["key"] = ["\x1f".join(values) for values in zip(*parts, strict=True)]
    return shown


def refuse_merged(frame: pd.DataFrame, ignored: Collection[str]) -> None:
    """Make sure that no cell of a sweep was taken for another one because of what is ignored.

    Raises:
        QueryError: one sweep has several values of what is ignored where all else is equal.
    """
    for axis in (axis for axis in AXES if axis in ignored):
        values = frame.groupby(["sweep", "key"])[axis].unique()
        several = values[values.map(len) > 1]
        if len(several):
            raise QueryError(
                f"--ignore {axis}: one sweep has cells that differ in it alone ({axis}="
                f"{', '.join(sorted(several.iloc[0]))}): they are several cells, not runs of one"
            )


def other_overrides(overrides: str, ignored: Collection[str] = ()) -> str:
    """The overrides of a cell that no axis shows and that are part of what it is, in one order."""
    others = beside_the_axes(overrides)
    return " ".join(sorted(f"{key}={value}" for key, value in others.items() if key not in ignored))


def beside_the_axes(overrides: str) -> dict[str, str]:
    """The overrides of a cell that no axis shows and that are part of what it is: each key and its value."""
    parts = (item.partition("=") for item in _NEXT_OVERRIDE.split(overrides))
    asked = {key.lstrip("+~"): value for key, equals, value in parts if equals}
    return {key: value for key, value in asked.items() if not _is_known(key)}


def _is_known(key: str) -> bool:
    return key in AXES or key in NOT_THE_CELL or key.startswith(("timeouts.", "hydra."))


def shown_axes(cells: pd.DataFrame) -> list[str]:
    """The axes in which these cells differ, parallelism in any case, and `others` if these differ."""
    return [
        axis
        for axis in (*AXES, "others")
        if axis == "parallel" or (axis in cells and cells[axis].nunique() > 1)
    ]


def not_in_common(old: pd.DataFrame, new: pd.DataFrame) -> str:
    """Why no cell of one side is a cell of the other: axes without a common value, else all that differ."""
    apart, partly = [], []
    for axis in (*AXES, "others"):
        before, after = set(old[axis]), set(new[axis])
        said = f"{'overrides' if axis == 'others' else axis} ({_some(before)} before, {_some(after)} now)"
        if not before & after:
            apart.append(said)
        elif before != after:
            partly.append(said)
    if apart:
        return "they differ in " + ", ".join(apart)
    return "no value is missing in either, but no combination is in both; they differ in " + ", ".join(partly)


def _some(values: set[str]) -> str:
    shown = sorted(value or "none" for value in values)
    return ", ".join(shown[:4]) + (f" and {len(shown) - 4} more" if len(shown) > 4 else "")


def _as_text(column: "pd.Series[str]") -> "pd.Series[str]":
    """Values as one writes them on the command line: true and not True."""
    known = {value: plain(value) for value in column.dropna().unique()}
    return column.astype(object).map(known).astype(object).fillna("-")
