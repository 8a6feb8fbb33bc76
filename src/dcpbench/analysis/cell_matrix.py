"""From rows to matrices of cells by sweeps: what each cell came to, and what it cost."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from dcpbench.analysis.cell_identity import other_overrides
from dcpbench.analysis.frame import AXES
from dcpbench.analysis.history_rows import Rows
from dcpbench.analysis.status_codes import ABSENT, Numbers, kind_numbers
from dcpbench.records.store import RESULTS_JSONL


@dataclass(frozen=True)
class History:
    """Cells over sweeps, these in order of time, which is that of their first cell's start.

    `sweeps` has a row a sweep: `name`, `folder`, `started_at`, `git_commit`, `torch_version`, the last three
    missing where no row says so. `cells` has a row a cell: its axes as text, and `others`, the overrides that
    no axis shows. `kinds` (cells, sweeps) are places in `kinds.KINDS`, the worst of a cell's runs, and
    `ABSENT`. `costs` are medians of a cell's runs (cells, sweeps), NaN where not measured. `reasons` has for
    each cell why its worst run in the last of its sweeps did not pass, or nothing.
    """

    sweeps: pd.DataFrame
    cells: pd.DataFrame
    kinds: Numbers
    costs: dict[str, npt.NDArray[np.float64]]
    reasons: list[str]


def history(rows: Rows, metrics: Sequence[str], last: int | None = None) -> History:
    """The history that these rows tell, of the newest sweeps if not of all; each metric is a column."""
    sweeps = _sweeps(rows)
    kept = sweeps.iloc[-last:] if last else sweeps
    place = np.full(len(rows.folders), -1)
    place[kept.index.to_numpy()] = np.arange(len(kept))
    at = place[rows.frame["at"].to_numpy(dtype=int)]
    frame, at = rows.frame[at >= 0], at[at >= 0]
    cell, cells = _numbered(frame)
    kinds = np.full((len(cells), len(kept)), ABSENT, dtype=np.int8)
    of_row = kind_numbers(frame)
    np.minimum.at(kinds, (cell, at), of_row)
    return History(
        kept.reset_index(drop=True),
        cells,
        kinds,
        {name: _medians(frame[name], cell, at, kinds.shape) for name in metrics},
        _reasons(frame["reason"], cell, at, of_row, kinds),
    )


def some(told: History, chosen: Sequence[int]) -> History:
    """These cells of a history."""
    places = list(chosen)
    return replace(
        told,
        cells=told.cells.iloc[places].reset_index(drop=True),
        kinds=told.kinds[places],
        costs={name: values[places] for name, values in told.costs.items()},
        reasons=[told.reasons[place] for place in places],
    )


def _sweeps(rows: Rows) -> pd.DataFrame:
    """A row a sweep that has any, in order of time; its index is the number of its folder."""
    columns = ["at", "started_at", "git_commit", "torch_version"]
    said = rows.frame[columns].drop_duplicates().astype(object)
    said["at"] = said["at"].astype(int)
    said = said.where(said.notna(), None)
    first = said.sort_values("started_at", kind="stable").groupby("at").first().sort_index()
    numbers = list(first.index)
    first.insert(0, "name", [rows.names[number] for number in numbers])
    first.insert(1, "folder", [str(rows.folders[number]) for number in numbers])
    when = [
        said or _written_at(rows, number) for said, number in zip(first["started_at"], numbers, strict=True)
    ]
    return first.assign(when=when).sort_values(["when", "name"], kind="stable").drop(columns="when")


def _written_at(rows: Rows, number: int) -> str:
    """Where no row says when it began: when the file was last written, in the same form."""
    path = rows.folders[number] / RESULTS_JSONL
    return datetime.fromtimestamp(path.stat().st_mtime, UTC).isoformat(timespec="seconds")


def _numbered(frame: pd.DataFrame) -> tuple[npt.NDArray[np.intp], pd.DataFrame]:
    """For each row the number of its cell, and the cells in the order in which they first come."""
    numbers = np.zeros(len(frame), dtype=np.int64)
    texts: dict[str, npt.NDArray[Any]] = {}
    for name in (*AXES, "overrides"):
        codes, values = pd.factorize(frame[name], use_na_sentinel=False)
        said = [_text(value, name) for value in values]
        places, known = pd.factorize(np.array(said, dtype=object))
        numbers = pd.factorize(numbers * len(known) + places[codes])[0]
        texts["others" if name == "overrides" else name] = np.array(known, dtype=object)[places][codes]
    first = np.unique(numbers, return_index=True)[1]
    return numbers, pd.DataFrame({name: said[first] for name, said in texts.items()}, dtype=object)


def _text(value: object, column: str) -> str:
    """A value as text, whole: what is cut short could make one cell of two."""
    if column == "overrides":
        return other_overrides(value) if isinstance(value, str) else ""
    if value is None or value is pd.NA or value != value:
        return "-"
    return str(value).lower() if pd.api.types.is_bool(value) else str(value)


def _medians(
    values: "pd.Series[Any]", cell: npt.NDArray[np.intp], at: npt.NDArray[Any], shape: tuple[int, ...]
) -> npt.NDArray[np.float64]:
    measured = pd.Series(values.to_numpy(dtype=float, na_value=np.nan)).groupby(cell * shape[1] + at).median()
    medians = np.full(shape, np.nan)
    medians.reshape(-1)[measured.index.to_numpy(dtype=int)] = measured.to_numpy()
    return medians


def _reasons(
    reason: "pd.Series[Any]",
    cell: npt.NDArray[np.intp],
    at: npt.NDArray[Any],
    of_row: Numbers,
    kinds: Numbers,
) -> list[str]:
    """For each cell the reason of its worst run in the last sweep that has one of it."""
    newest = kinds.shape[1] - 1 - (kinds[:, ::-1] != ABSENT).argmax(axis=1)
    meant = (at == newest[cell]) & (of_row == kinds[cell, at])
    told = [""] * len(kinds)
    for number, said in zip(cell[meant][::-1], reason[meant].astype(object)[::-1], strict=True):
        told[number] = said if isinstance(said, str) else ""
    return told
