"""The rows of many sweeps, with the columns that a history needs and no others."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd

from dcpbench.analysis.cell_identity import identity_keys, override_values, with_cells
from dcpbench.analysis.frame import frame_of, short_names, sweeps_in
from dcpbench.core.axes import AXES
from dcpbench.records.row import Row
from dcpbench.records.store import RESULTS_CSV, ResultsError, read_rows, stored_rows

_COLUMNS = (
    *("cell", "status", "started_at", "overrides", "config_digest", "reason", "flaky", "fault_seen"),
    *("repeat", "torch_version", "git_commit", "ranks_per_gpu", "backend"),
)
_LOOKED_AT = 10
_LEAST_IN_COMMON = 0.5


@dataclass(frozen=True)
class Rows:
    """The rows of sweeps.

    Args:
        frame: columns as `read_sweeps` has them; `sweep` is a short name, no two alike.
        folders: the sweeps' folders by these names.
        remarks: sentences on what could not be read.
        keys: the overrides that are part of a cell's identity, see `cell_identity.identity_keys`.
    """

    frame: pd.DataFrame
    folders: dict[str, Path]
    remarks: list[str]
    keys: Collection[str] = ()
    _stored: dict[str, list[Row]] = field(default_factory=dict)

    def config(self, sweep: str, **wanted: str) -> Mapping[str, Any]:
        """The configuration of the row in this sweep whose column has this value; empty if there is none."""
        ((column, value),) = wanted.items()
        if sweep not in self._stored:
            self._stored[sweep] = list(stored_rows(self.folders[sweep]))
        return next((row.config for row in self._stored[sweep] if row[column] == value), {})


def read_history(places: Sequence[Path], columns: Sequence[str] = ()) -> Rows:
    """The rows of all sweeps in these places with a history's columns and these; ResultsError if none."""
    found = {sweep.resolve(): sweep for place in places for sweep in sweeps_in(place)}.values()
    folders = {name: Path(folder) for folder, name in short_names(map(str, found)).items()}
    values: dict[str, list[Any]] = {name: [] for name in dict.fromkeys(["sweep", *_COLUMNS, *AXES, *columns])}
    remarks = []
    for name, folder in folders.items():
        try:
            rows, damaged = read_rows(folder, details=False)
        except ResultsError as error:
            rows, damaged = [], [str(error)]
        remarks += damaged
        for column, of_all in values.items():
            of_all += [name if column == "sweep" else row[column] for row in rows]
    if not values["sweep"]:
        told = "; ".join([f"no rows in {len(folders)} sweeps", *remarks[:1]])
        raise ResultsError(f"{', '.join(map(str, places))}: {told}")
    read = Rows(frame_of(values), folders, remarks)
    return replace(read, keys=_identity_keys(read))


def sweep_before(folder: Path) -> Path | None:
    """The newest sweep beside the one in `folder` that ended, began before it did and has half of its cells,
    whatever they are called there; None if there is none."""
    own = folder.resolve()
    rows = _rows_of(own)
    written = {path.parent: _written_ns(path) for path in own.parent.glob(f"*/{RESULTS_CSV}")}
    limit = max(map(_written_ns, own.glob("results.*")), default=0)
    ended = [place for place, at in written.items() if place != own and at <= limit]
    for place in sorted(ended, key=written.__getitem__, reverse=True)[:_LOOKED_AT]:
        other = _rows_of(place)
        if rows is None or other is None:
            continue
        frames, keys = (rows.frame, other.frame), {*rows.keys, *other.keys}
        began, then = (one["started_at"].dropna().min() for one in frames)
        cells, there = (with_cells(one, keys)["address"].drop_duplicates() for one in frames)
        if (pd.isna(began) or pd.isna(then) or then < began) and cells.isin(there).mean() >= _LEAST_IN_COMMON:
            return place
    return None


def _rows_of(folder: Path) -> Rows | None:
    with suppress(ResultsError, OSError):  # what lies beside a sweep may be anybody's
        return read_history([folder])
    return None


def _written_ns(path: Path) -> int:
    with suppress(OSError):  # it may go at any time
        return path.lstat().st_mtime_ns
    return 0


def _identity_keys(rows: Rows) -> set[str]:
    """`identity_keys`, by one of the newest configurations for each key that is overridden anywhere."""
    once = rows.frame.drop_duplicates("overrides", keep="last").dropna(subset="overrides")
    of_lines = dict(zip(once["overrides"], once["sweep"], strict=True))
    newest = {key: line for line in of_lines for key in override_values(line)}
    configs = (rows.config(of_lines[line], overrides=line) for line in newest.values())
    return identity_keys(newest.values(), configs)
