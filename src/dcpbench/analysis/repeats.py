"""Rows that differ only in `repeat` are runs of one cell: which they are, and what they come to together."""

import re

import pandas as pd

from dcpbench.analysis.frame import AXES, is_true
from dcpbench.records.store import CHECKS, STATUSES

_REPEAT = re.compile(r"(^|[ ,])repeat=\d+(?=$|[ ,])")
_NOT_WELL = STATUSES.index("xpass")
_RANKS = {status: rank if rank <= _NOT_WELL else rank + 1 for rank, status in enumerate(STATUSES)}
_FLAKY = _NOT_WELL + 1
_UNKNOWN = -1


def without_repeat(text: "pd.Series[str]") -> "pd.Series[str]":
    """The names or the overrides of cells, whichever of their runs they were taken from."""
    return text.fillna("").map(lambda said: _REPEAT.sub("", said).strip(" ,")).astype("string")


def status_text(frame: pd.DataFrame) -> "pd.Series[str]":
    """The status as it is shown: one that a second try changed says so."""
    return frame["status"].mask(is_true(frame["flaky"]), frame["status"] + " (flaky)")


def severity(frame: pd.DataFrame) -> "pd.Series[int]":
    """How bad each row is: the least is the worst, and a status that is not known is worse than any."""
    rank = frame["status"].map(lambda status: _RANKS.get(status, _UNKNOWN)).astype(int)
    return rank.mask(is_true(frame["flaky"]) & (rank > _FLAKY), _FLAKY)


def cell_numbers(frame: pd.DataFrame) -> "pd.Series[int]":
    """For each row the number of the cell that it is a run of, counted in the order of their first runs.

    Rows that say the same cell and no `repeat` are damage, not runs: each is counted for itself.
    """
    what = frame[[name for name in ("sweep", *AXES, "config_dir") if name in frame]].assign(
        cell=without_repeat(frame["cell"]), overrides=without_repeat(frame["overrides"])
    )
    what["copy"] = what.groupby(list(what.columns), dropna=False).cumcount().where(frame["repeat"].isna(), 0)
    return what.groupby(list(what.columns), dropna=False, sort=False).ngroup()


def one_a_cell(frame: pd.DataFrame) -> pd.DataFrame:
    """One row for each cell, with the columns of `frame` and two more: `runs`, how many, and `so_many`,
    how many of them came to the status that is told.

    It is the row of the worst run, the first of them; a check has held if it held in every run that made
    it; numbers that were measured are the median of the runs. `cell` and `overrides` name no repeat.
    """
    if frame.empty:
        return frame.assign(runs=pd.Series(dtype=int), so_many=pd.Series(dtype=int))
    frame = frame.reset_index(drop=True)
    numbers = cell_numbers(frame)
    ranks = severity(frame)
    worst = ranks.groupby(numbers).idxmin()
    cells = frame.loc[worst.to_numpy()].set_axis(worst.index)
    cells["cell"], cells["overrides"] = without_repeat(cells["cell"]), without_repeat(cells["overrides"])
    runs = frame.groupby(numbers)
    for check in CHECKS:
        cells[check] = runs[check].min()
    for name in (column for column in frame.columns if column.endswith(("_s", "_bytes"))):
        cells[name] = runs[name].median()
    cells["flaky"] = runs["flaky"].max()
    cells["runs"] = runs.size()
    cells["so_many"] = (ranks == ranks.groupby(numbers).transform("min")).groupby(numbers).sum()
    return cells.reset_index(drop=True)


def runs_text(cells: pd.DataFrame) -> "pd.Series[str]":
    """`5 runs`, or `2 of 5 runs` where only these came to the status that is told; nothing for one run."""
    told = [
        "" if runs == 1 else f"{runs} runs" if so_many == runs else f"{so_many} of {runs} runs"
        for so_many, runs in zip(cells["so_many"], cells["runs"], strict=True)
    ]
    return pd.Series(told, index=cells.index, dtype="string")
