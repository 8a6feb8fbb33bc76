"""One cost of the cells that two sides have in common, as tables of logarithms."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from dcpbench.records.row import AXES

Array = np.ndarray[Any, np.dtype[Any]]

_NOT_GROUPED = ("seed", "fault")


@dataclass(frozen=True)
class Side:
    """What one side measured of each cell: `runs`, `median`, `lowest` and `highest` by the cells' keys, and
    `logs` (cells, rounds), the logarithm of each cell in each round, NaN where it was not measured."""

    runs: "pd.Series[int]"
    median: "pd.Series[float]"
    lowest: "pd.Series[float]"
    highest: "pd.Series[float]"
    logs: Array


def usable(frame: pd.DataFrame) -> pd.DataFrame:
    """The runs whose costs may be compared: those that came out as they should, without planted faults."""
    return frame[frame["status"].isin(["pass", "xfail"]) & frame["fault"].eq("-")]


def side(frame: pd.DataFrame, metric: str, keys: list[str], by_sweep: bool) -> Side:
    """One metric of one side.

    Args:
        frame: rows with `key`, see `cell_identity.with_cells`.
        by_sweep: a round is a whole sweep, and not one of its repeats.
    """
    values = pd.to_numeric(frame[metric], errors="coerce").astype(float)
    if metric == "save_stall_s":  # of a synchronous save it is its save_s once more
        values = values.mask(frame["save"].eq("sync"))
    seen = frame.assign(value=values.where(values > 0))[["key", "sweep", "repeat", "value"]].dropna()
    by_cell = seen.groupby("key")["value"]
    rounds = ["sweep"] if by_sweep else ["sweep", "repeat"]
    logs = np.log(seen["value"]).groupby([seen[name] for name in ("key", *rounds)]).mean()
    table = logs.unstack(rounds) if len(logs) else pd.DataFrame(index=pd.Index([], name="key"))
    return Side(
        by_cell.count().reindex(keys).fillna(0).astype(int),
        by_cell.median().reindex(keys),
        by_cell.min().reindex(keys),
        by_cell.max().reindex(keys),
        table.reindex(keys).to_numpy(dtype=float),
    )


def groups(cells: pd.DataFrame, measured: Array) -> tuple[list[str], Array]:
    """Sets of cells that may share a change: each value of an axis that has more than one, but not all.

    Args:
        cells: one row for each cell, with the axes as text.
        measured: (cells,), which of them both sides measured.

    Returns:
        the name of each set, and which cells are in it, (sets, cells).
    """
    found: dict[str, Array] = {}
    for axis in (axis for axis in AXES if axis not in _NOT_GROUPED):
        values = cells[axis].to_numpy()
        for value in dict.fromkeys(values[measured]):
            chosen = measured & (values == value)
            if 1 < chosen.sum() < measured.sum():
                found[f"{axis}={value}"] = chosen
    return list(found), np.array(list(found.values()), dtype=bool).reshape(len(found), len(cells))
