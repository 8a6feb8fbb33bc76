"""The history of cells over sweeps: the statuses and costs of each cell, and where they changed."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from dcpbench.analysis.cell_identity import (
    cell_names,
    config_differences,
    identity_keys,
    override_values,
    with_cells,
)
from dcpbench.analysis.change_points import Change, changes
from dcpbench.analysis.costs import run_alike
from dcpbench.analysis.frame import frame_of, outcomes, records, short_names, sweeps_in
from dcpbench.code.sources import COMMITS, joined
from dcpbench.core.axes import AXES
from dcpbench.core.metrics import METRICS
from dcpbench.core.statuses import SEVERITY, SHOWN, StatusSpec
from dcpbench.records.row import Row
from dcpbench.records.store import (
    RESULTS_CSV,
    RESULTS_JSONL,
    ResultsError,
    read_rows,
    stored_rows,
)

_COLUMNS = (
    *("cell", "status", "started_at", "overrides", "config_digest", "reason", "flaky", "fault_seen"),
    *("repeat", "torch_version", *COMMITS, "ranks_per_gpu", "backend"),
)
_LOOKED_AT = 10
_LEAST_IN_COMMON = 0.5

KINDS = tuple(SHOWN.values())
"""The statuses that a cell is shown with, the worst first; the last is for a sweep without a row of it."""

ABSENT = len(KINDS) - 1


@dataclass(frozen=True)
class Rows:
    """The rows of sweeps.

    Args:
        frame: some columns of `read_sweeps`; `sweep` is a short, unique name.
        folders: the sweeps' folders by these names.
        remarks: sentences about what could not be read.
        keys: the overrides that are part of a cell's identity, see `cell_identity.identity_keys`.
    """

    frame: pd.DataFrame
    folders: dict[str, Path]
    remarks: list[str]
    keys: Collection[str] = ()
    _stored: dict[str, list[Row]] = field(default_factory=dict)

    def config(self, sweep: str, column: str, value: str) -> Mapping[str, Any]:
        """Return the configuration of the first row of a sweep with this value in a column, or an empty
        one."""
        if sweep not in self._stored:
            self._stored[sweep] = list(stored_rows(self.folders[sweep]))
        return next((row.config for row in self._stored[sweep] if row[column] == value), {})


def read_history(places: Sequence[Path], columns: Sequence[str] = ()) -> Rows:
    """Read the rows of all sweeps in these places, with these columns too; ResultsError if there are none."""
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
        problem = "; ".join([f"no rows in {len(folders)} sweeps", *remarks[:1]])
        raise ResultsError(f"{', '.join(map(str, places))}: {problem}")
    read = Rows(frame_of(values), folders, remarks)
    return replace(read, keys=_identity_keys(read))


def sweep_before(folder: Path) -> Path | None:
    """Return the newest earlier sweep in the same parent folder that has ended and has at least half of this
    sweep's cells, or None."""
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
    with suppress(ResultsError, OSError):  # another user may own the folder
        return read_history([folder])
    return None


def _written_ns(path: Path) -> int:
    with suppress(OSError):  # it can be removed at any time
        return path.lstat().st_mtime_ns
    return 0


def _identity_keys(rows: Rows) -> set[str]:
    """Return `identity_keys` by one of the newest configurations for each overridden key."""
    once = rows.frame.drop_duplicates("overrides", keep="last").dropna(subset="overrides")
    of_lines = dict(zip(once["overrides"], once["sweep"], strict=True))
    newest = {key: line for line in of_lines for key in override_values(line)}
    configs = (rows.config(of_lines[line], "overrides", line) for line in newest.values())
    return identity_keys(newest.values(), configs)


@dataclass(frozen=True)
class Cost:
    """One metric of a cell over the sweeps: its medians, NaN if not measured, and their changes."""

    metric: str
    medians: npt.NDArray[np.float64]
    changes: list[Change]

    @property
    def latest(self) -> float:
        """Return the newest median that was measured, or NaN."""
        measured = self.medians[~np.isnan(self.medians)]
        return float(measured[-1]) if measured.size else float("nan")


@dataclass(frozen=True)
class CellHistory:
    """One cell over the sweeps.

    Args:
        axes: its axes as text, its other overrides as `others`, and its `config_digest`, if known.
        kinds: for each sweep the index in `KINDS` of its worst run, or `ABSENT`.
        reason: why its worst run in the last sweep that has it did not pass, or empty.
        reconfigured: the old and new values by key, if it replaced a cell with another configuration in the
            first sweep that has it; else None.
        replaced: whether a cell with another configuration has replaced it.
    """

    name: str
    axes: dict[str, Any]
    kinds: tuple[int, ...]
    costs: list[Cost]
    reason: str = ""
    reconfigured: dict[str, tuple[str, str]] | None = None
    replaced: bool = False

    @cached_property
    def seen(self) -> list[int]:
        """Return the sweeps that have it."""
        return [at for at, kind in enumerate(self.kinds) if kind != ABSENT]

    @property
    def now(self) -> StatusSpec:
        """Return its status in the last sweep that has it."""
        return KINDS[self.kinds[self.seen[-1]]]

    @cached_property
    def turn(self) -> tuple[int, StatusSpec] | None:
        """Return the sweep since which it has its status, and the status before; None if there was no
        other."""
        for before, at in reversed([*pairwise(self.seen)]):
            if self.kinds[before] != self.kinds[at]:
                return at, KINDS[self.kinds[before]]
        return None

    @cached_property
    def changed(self) -> int:
        """Return the last sweep at which its status, configuration or a cost changed, or -1."""
        places = [change.at for cost in self.costs for change in cost.changes]
        places += [self.turn[0]] if self.turn else []
        places += [self.seen[0]] if self.reconfigured is not None else []
        return max(places, default=-1)


@dataclass(frozen=True)
class History:
    """Cells over sweeps.

    Args:
        sweeps: one row per sweep, ordered by start: `name`, `folder`, `started_at`, `torch_version`,
            `dcpbench_commit`, `target_commit`; the last four can be missing.
        cells: ordered by their last change, the newest first, failed cells before others.
    """

    sweeps: pd.DataFrame
    cells: list[CellHistory]


def history(rows: Rows, metrics: Sequence[str], last: int | None = None) -> History:
    """Return the history of the `last` sweeps, with medians of these columns."""
    sweeps = _sweeps(rows)
    sweeps = sweeps.iloc[-last:] if last else sweeps
    place = pd.Series(range(len(sweeps)), index=sweeps["name"])
    frame = rows.frame.assign(place=rows.frame["sweep"].map(place)).dropna(subset="place")
    frame = with_cells(frame.sort_values("place", kind="stable", ignore_index=True), rows.keys)
    kind_of_row = [SEVERITY[spec.name] for spec in outcomes(frame)]
    frame = frame.assign(cell=pd.factorize(frame["key"])[0], kind=kind_of_row)
    times = [name for name in metrics if name in METRICS and METRICS[name].unit == "s"]
    frame[times] = frame[times].where(run_alike(frame, frame), axis=0)
    runs = frame.astype(dict.fromkeys(metrics, float)).groupby(["cell", "place"])
    worst = runs["kind"].min()
    kinds = _matrix(worst, len(sweeps)).fillna(ABSENT).to_numpy(dtype=np.int8)
    costs = _costs({name: _matrix(runs[name].median(), len(sweeps)).to_numpy() for name in metrics})
    cells = frame.drop_duplicates("key").set_index("cell")
    names, axes = cell_names(cells), records(cells[[*AXES, "others", "config_digest"]])
    reasons = _reasons(frame, worst)
    reconfigured = _reconfigured(rows, cells, kinds, list(sweeps["name"]))
    replaced = {before for before, _ in reconfigured.values()}
    found = [
        CellHistory(
            names[number],
            axes[number],
            tuple(kinds[number].tolist()),
            costs[number],
            reasons[number],
            reconfigured.get(number, (0, None))[1],
            number in replaced,
        )
        for number in range(len(cells))
    ]
    return History(sweeps, sorted(found, key=lambda cell: (-cell.changed, cell.now.ok)))


def folded(cells: Sequence[CellHistory], visible: int, every: bool = False) -> dict[str, list[CellHistory]]:
    """Group the cells by how they are shown if only the newest `visible` sweeps are.

    `shown`: cells that are not ok, or changed in these sweeps; all cells if `every`, or if there is one
    sweep. The others are ok: `steady` without any change, `earlier` with an earlier change, `replaced` by
    another configuration, or `absent` from these sweeps.
    """

    def group(cell: CellHistory) -> str:
        first = max(0, len(cell.kinds) - visible)
        if every or len(cell.kinds) == 1:
            return "shown"
        if cell.seen[-1] < first or cell.replaced:
            return "replaced" if cell.seen[-1] >= first else "absent"
        if not cell.now.ok or cell.changed >= first:
            return "shown"
        return "steady" if cell.changed < 0 else "earlier"

    groups = defaultdict(list)
    for cell in cells:
        groups[group(cell)].append(cell)
    return groups


def _sweeps(rows: Rows) -> pd.DataFrame:
    """Return one row per sweep, in order of time."""
    known = rows.frame[["sweep", "started_at", "torch_version", *COMMITS]].drop_duplicates()
    by_sweep = known.sort_values("started_at", kind="stable").groupby("sweep")
    first = by_sweep.first()
    commits = {name: joined(of.dropna()) for name, of in by_sweep["target_commit"]}
    first["target_commit"] = pd.Series(commits, dtype="string")
    folders = [rows.folders[name] for name in first.index]
    first.insert(0, "folder", list(map(str, folders)))
    # If no row has its start, the time of the file's last change is used.
    files = [folder / RESULTS_JSONL for folder in folders]
    written = [datetime.fromtimestamp(path.stat().st_mtime, UTC) for path in files]
    times = pd.Series([at.isoformat(timespec="seconds") for at in written], first.index, dtype="string")
    first = first.assign(began=first["started_at"].fillna(times)).rename_axis("name").reset_index()
    return first.sort_values(["began", "name"], kind="stable", ignore_index=True).drop(columns="began")


def _matrix(values: "pd.Series[Any]", sweeps: int) -> pd.DataFrame:
    """Return values as a matrix of cells and sweeps."""
    return values.unstack().reindex(columns=range(sweeps))


def _costs(medians: dict[str, npt.NDArray[np.float64]]) -> list[list[Cost]]:
    """Return the costs of each cell, from medians of (cells, sweeps); the rate of false alarms is for all."""
    series = np.concatenate(list(medians.values()))
    found = iter(changes(series))
    by_metric = [[Cost(name, one, next(found)) for one in of_metric] for name, of_metric in medians.items()]
    return [list(of_cell) for of_cell in zip(*by_metric, strict=True)]


def _reasons(frame: pd.DataFrame, worst: "pd.Series[int]") -> list[str]:
    """Return for each cell the reason of the first worst run in the last sweep that has it."""
    last = worst.reset_index().drop_duplicates("cell", keep="last")
    runs = frame[["cell", "place", "kind", "reason"]].merge(last, on=["cell", "place", "kind"])
    return list(runs.drop_duplicates("cell").sort_values("cell")["reason"].fillna(""))


def _reconfigured(
    rows: Rows, cells: pd.DataFrame, kinds: npt.NDArray[np.int8], sweeps: Sequence[str]
) -> dict[int, tuple[int, dict[str, tuple[str, str]]]]:
    """Return for each cell that replaced another at its address: the last such cell, and the keys in which
    their configurations differ, with both values."""
    seen = kinds != ABSENT
    first, last = seen.argmax(axis=1), kinds.shape[1] - 1 - seen[:, ::-1].argmax(axis=1)
    found = {}
    for numbers in cells.groupby("address").groups.values():
        for number in numbers if len(numbers) > 1 else ():
            earlier = [other for other in numbers if last[other] < first[number]]
            if earlier:
                before = max(earlier, key=lambda other: last[other])
                configs = [
                    rows.config(sweeps[last[one]], "config_digest", cells["config_digest"][one])
                    for one in (before, number)
                ]
                found[int(number)] = (int(before), config_differences(*configs))
    return found
