"""Rows that differ only in `repeat` are runs of one cell: which they are, and their results together."""

import re
import shlex

import pandas as pd

from dcpbench.analysis.cell_identity import override_words
from dcpbench.analysis.frame import is_true
from dcpbench.records.checks import CHECKS
from dcpbench.records.metrics import METRICS
from dcpbench.records.row import AXES, STATUSES

_REPEAT = re.compile(r"(^|,)repeat=\d+(?=$|,)")
_FLAKY = STATUSES.index("xpass") + 0.5
_UNKNOWN = -1


def without_repeat(overrides: object) -> str:
    """The overrides of a cell, whichever of its runs they were taken from."""
    return shlex.join(word for word in override_words(overrides) if not word.startswith("repeat="))


def status_text(frame: pd.DataFrame) -> "pd.Series[str]":
    """The status as it is shown: one that a second try changed says so."""
    return frame["status"].mask(is_true(frame["flaky"]), frame["status"] + " (flaky)")


def severity(frame: pd.DataFrame) -> "pd.Series[float]":
    """How bad each row is: the least is the worst, and a status that is not known is worse than any."""
    rank = frame["status"].map({status: rank for rank, status in enumerate(STATUSES)}).astype(float)
    return rank.fillna(_UNKNOWN).mask(is_true(frame["flaky"]), rank.clip(upper=_FLAKY).fillna(_UNKNOWN))


def cell_numbers(frame: pd.DataFrame) -> "pd.Series[int]":
    """For each row the number of the cell that it is a run of, counted in the order of their first runs.

    Rows that have the same cell and no `repeat` are damage, not runs: each is counted for itself.
    """
    names = [name for name in ("sweep", *AXES, "config_dir", "cell", "overrides") if name in frame]
    identity = _without_repeat_in_names(frame[names])
    identity["copy"] = identity.groupby(names, dropna=False).cumcount().where(frame["repeat"].isna(), 0)
    return identity.groupby([*names, "copy"], dropna=False, sort=False).ngroup()


def one_a_cell(frame: pd.DataFrame) -> pd.DataFrame:
    """One row for each cell, with the columns of `frame` and two more: `runs`, how many, and
    `agreeing_runs`, how many of them have the status that is shown.

    It is the row of the worst run, the first of them; a check has held if it held in every run that made
    it; metrics are the median of the runs. `cell` and `overrides` name no repeat.
    """
    if frame.empty:
        return frame.assign(runs=pd.Series(dtype=int), agreeing_runs=pd.Series(dtype=int))
    frame = frame.reset_index(drop=True)
    numbers, ranks = cell_numbers(frame), severity(frame)
    worst = ranks.groupby(numbers).idxmin()
    cells = _without_repeat_in_names(frame.loc[worst.to_numpy()].set_axis(worst.index))
    runs = frame.groupby(numbers)
    for check in CHECKS:
        cells[check] = runs[check].min()
    for metric in METRICS:
        cells[metric] = runs[metric].median()
    cells["flaky"] = runs["flaky"].max()
    cells["runs"] = runs.size()
    cells["agreeing_runs"] = (ranks == ranks.groupby(numbers).transform("min")).groupby(numbers).sum()
    return cells.reset_index(drop=True)


def runs_text(cells: pd.DataFrame) -> "pd.Series[str]":
    """`5 runs`, or `2 of 5 runs` where only these have the status that is shown; nothing for one run."""
    texts = [
        "" if runs == 1 else f"{runs} runs" if agreeing == runs else f"{agreeing} of {runs} runs"
        for agreeing, runs in zip(cells["agreeing_runs"], cells["runs"], strict=True)
    ]
    return pd.Series(texts, index=cells.index, dtype="string")


def _without_repeat_in_names(frame: pd.DataFrame) -> pd.DataFrame:
    cells = frame["cell"].fillna("").map(lambda name: _REPEAT.sub("", name).strip(" ,"))
    overrides = frame["overrides"].map(without_repeat)
    return frame.assign(cell=cells.astype("string"), overrides=overrides.astype("string"))
