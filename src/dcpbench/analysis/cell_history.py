"""The history of cells over sweeps: for each cell its statuses and costs, and what changed at which sweep."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from dcpbench.analysis.cell_identity import cell_names, config_differences, with_cells
from dcpbench.analysis.change_points import Change, changes
from dcpbench.analysis.costs import run_alike
from dcpbench.analysis.frame import is_false, is_true, records, severities
from dcpbench.analysis.history_rows import Rows
from dcpbench.core.axes import AXES
from dcpbench.core.metrics import METRICS
from dcpbench.core.statuses import SEVERITY, SHOWN, StatusSpec
from dcpbench.records.store import RESULTS_JSONL, row_folders

KINDS = tuple(SHOWN.values())
"""What a cell is shown as in a sweep, the worst first; the last is for a sweep in which it has no row."""

ABSENT = len(KINDS) - 1


def kind_numbers(frame: pd.DataFrame) -> "pd.Series[int]":
    """For each row which of `KINDS` it is; being flaky, or a planted fault, counts before its status."""
    kinds = severities(frame["status"])
    kinds = kinds.mask(is_true(frame["fault_seen"]), SEVERITY["seen"])
    kinds = kinds.mask(is_false(frame["fault_seen"]), SEVERITY["missed"])
    return kinds.mask(is_true(frame["flaky"]), SEVERITY["flaky"])


@dataclass(frozen=True)
class Cost:
    """One metric of a cell over the sweeps: its medians, NaN where not measured, and where they changed."""

    metric: str
    medians: npt.NDArray[np.float64]
    changes: list[Change]

    @property
    def latest(self) -> float:
        """The newest that was measured; NaN if none was."""
        measured = self.medians[~np.isnan(self.medians)]
        return float(measured[-1]) if measured.size else float("nan")


@dataclass(frozen=True)
class CellHistory:
    """One cell over the sweeps.

    Args:
        axes: its axes as text, `others`, the overrides that no axis shows, and `config_digest`, if known.
        kinds: for each sweep the place in `KINDS` of the worst of its runs, or `ABSENT`.
        reason: why its worst run in the last sweep that has it did not pass, or nothing.
        reconfigured: from the first sweep on that has it, it takes the place of a cell with these
            differences in its configuration (old and new value by key); None if it takes no other's place.
        replaced: another configuration has taken its place since.
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
        """The sweeps that have it."""
        return [at for at, kind in enumerate(self.kinds) if kind != ABSENT]

    @property
    def now(self) -> StatusSpec:
        """Its status in the last sweep that has it."""
        return KINDS[self.kinds[self.seen[-1]]]

    @cached_property
    def turn(self) -> tuple[int, StatusSpec] | None:
        """Since which sweep it has its present status, and the one before; None if it never had another."""
        for before, at in reversed([*pairwise(self.seen)]):
            if self.kinds[before] != self.kinds[at]:
                return at, KINDS[self.kinds[before]]
        return None

    @cached_property
    def changed(self) -> int:
        """The last sweep at which its status, configuration or a cost changed; -1 if there is none."""
        places = [change.at for cost in self.costs for change in cost.changes]
        places += [self.turn[0]] if self.turn else []
        places += [self.seen[0]] if self.reconfigured is not None else []
        return max(places, default=-1)


@dataclass(frozen=True)
class History:
    """Cells over sweeps, these in order of time, which is that of their first cell's start.

    Args:
        sweeps: a row a sweep: `name`, `folder`, `started_at`, `git_commit`, `torch_version`, the last three
            missing where no row says so.
        cells: what changed last comes first, and of these what is not ok.
    """

    sweeps: pd.DataFrame
    cells: list[CellHistory]


def history(rows: Rows, metrics: Sequence[str], last: int | None = None) -> History:
    """The history of the rows of the `last` sweeps, by medians of these columns."""
    sweeps = _sweeps(rows)
    sweeps = sweeps.iloc[-last:] if last else sweeps
    place = pd.Series(range(len(sweeps)), index=sweeps["name"])
    frame = rows.frame.assign(place=rows.frame["sweep"].map(place)).dropna(subset="place")
    frame = with_cells(frame.sort_values("place", kind="stable", ignore_index=True), rows.keys)
    frame = frame.assign(cell=pd.factorize(frame["key"])[0], kind=kind_numbers(frame))
    times = [name for name in metrics if name in METRICS and METRICS[name].unit == "s"]
    frame[times] = frame[times].where(run_alike(frame, frame), axis=0)
    runs = frame.astype(dict.fromkeys(metrics, float)).groupby(["cell", "place"])
    worst = runs["kind"].min()
    kinds = _matrix(worst, len(sweeps)).fillna(ABSENT).to_numpy(dtype=np.int8)
    costs = _costs({name: _matrix(runs[name].median(), len(sweeps)).to_numpy() for name in metrics})
    cells = frame.drop_duplicates("key").set_index("cell")
    cells["config_digest"] = frame.groupby("cell")["config_digest"].first()
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
    """The cells by how they are shown where so many of the newest sweeps are visible.

    `shown` one by one are those that are not ok, and those in which something changed in these sweeps; all
    if `every`, or if there is but one sweep. The others are ok now: `steady` all along, or since something
    changed `earlier`. Those that another configuration has taken the place of are `replaced`, those that
    none of these sweeps has `absent`.
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
    """A row a sweep that has any, in order of time."""
    known = rows.frame[["sweep", "started_at", "git_commit", "torch_version"]].drop_duplicates()
    first = known.sort_values("started_at", kind="stable").groupby("sweep").first()
    folders = [rows.folders[name] for name in first.index]
    first.insert(0, "folder", list(map(str, folders)))
    # Where no row says when it began, that is when the file was last written.
    files = [row_folders(folder)[0] / RESULTS_JSONL for folder in folders]
    written = [datetime.fromtimestamp(path.stat().st_mtime, UTC) for path in files]
    times = pd.Series([at.isoformat(timespec="seconds") for at in written], first.index, dtype="string")
    first = first.assign(began=first["started_at"].fillna(times)).rename_axis("name").reset_index()
    return first.sort_values(["began", "name"], kind="stable", ignore_index=True).drop(columns="began")


def _matrix(values: "pd.Series[Any]", sweeps: int) -> pd.DataFrame:
    """Values of cells in sweeps as a matrix, missing where there is none."""
    return values.unstack().reindex(columns=range(sweeps))


def _costs(medians: dict[str, npt.NDArray[np.float64]]) -> list[list[Cost]]:
    """For each cell its costs, by medians of (cells, sweeps); one rate of false alarms holds for all."""
    series = np.concatenate(list(medians.values()))
    found = iter(changes(series))
    by_metric = [[Cost(name, one, next(found)) for one in of_metric] for name, of_metric in medians.items()]
    return [list(of_cell) for of_cell in zip(*by_metric, strict=True)]


def _reasons(frame: pd.DataFrame, worst: "pd.Series[int]") -> list[str]:
    """For each cell the reason of its worst run in the last sweep that has one of it, the first of them."""
    last = worst.reset_index().drop_duplicates("cell", keep="last")
    runs = frame[["cell", "place", "kind", "reason"]].merge(last, on=["cell", "place", "kind"])
    return list(runs.drop_duplicates("cell").sort_values("cell")["reason"].fillna(""))


def _reconfigured(
    rows: Rows, cells: pd.DataFrame, kinds: npt.NDArray[np.int8], sweeps: Sequence[str]
) -> dict[int, tuple[int, dict[str, tuple[str, str]]]]:
    """By cell that came to another one's address after it: which cell that was, the last before it, and the
    keys in which their configurations differ, with both values."""
    seen = kinds != ABSENT
    first, last = seen.argmax(axis=1), kinds.shape[1] - 1 - seen[:, ::-1].argmax(axis=1)
    found = {}
    for numbers in cells.groupby("address").groups.values():
        for number in numbers if len(numbers) > 1 else ():
            earlier = [other for other in numbers if last[other] < first[number]]
            if earlier:
                before = max(earlier, key=lambda other: last[other])
                configs = [
                    rows.config(sweeps[last[one]], config_digest=cells["config_digest"][one])
                    for one in (before, number)
                ]
                found[int(number)] = (int(before), config_differences(*configs))
    return found
