"""The history of cells over sweeps: the statuses and costs of each cell, and where they changed."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from dcpbench.analysis.cell_identity import add_cell_keys, config_differences, identity_keys, names_of_cells
from dcpbench.analysis.change_points import Change, find_change_points
from dcpbench.analysis.costs import are_comparable
from dcpbench.analysis.frame import Sweeps, outcomes, plain_rows, without_retries
from dcpbench.analysis.query import Condition, QueryError, select_rows
from dcpbench.code.sources import COMMITS, merged_commits
from dcpbench.config.text import counted
from dcpbench.core.axes import AXES
from dcpbench.core.metrics import METRICS
from dcpbench.core.statuses import SEVERITY, SHOWN, StatusSpec
from dcpbench.records.store import RESULTS_JSONL

KINDS = tuple(SHOWN.values())
"""The statuses that a cell is shown with, the worst first; the last is for a sweep without a row of it."""

NO_RUN = len(KINDS) - 1


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
    def present_in(self) -> list[int]:
        """Return the sweeps that have it."""
        return [at for at, kind in enumerate(self.kinds) if kind != NO_RUN]

    @property
    def current_status(self) -> StatusSpec:
        """Return its status in the last sweep that has it."""
        return KINDS[self.kinds[self.present_in[-1]]]

    @cached_property
    def last_change_of_status(self) -> tuple[int, StatusSpec] | None:
        """Return the sweep since which it has its status, and the status before; None if there was no
        other."""
        for before, at in reversed([*pairwise(self.present_in)]):
            if self.kinds[before] != self.kinds[at]:
                return at, KINDS[self.kinds[before]]
        return None

    @cached_property
    def last_change(self) -> int:
        """Return the last sweep at which its status, configuration or a cost changed, or -1."""
        places = [change.at for cost in self.costs for change in cost.changes]
        places += [self.last_change_of_status[0]] if self.last_change_of_status else []
        places += [self.present_in[0]] if self.reconfigured is not None else []
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


def history(
    sweeps: Sweeps, metrics: Sequence[str], last: int | None = None, where: Sequence[Condition] = ()
) -> History:
    """Return the history of the cells in the rows that meet all conditions, over the `last` sweeps, with
    medians of these columns.

    Raises:
        dcpbench.analysis.query.QueryError: no row meets every condition.
    """
    rows = select_rows(
        without_retries(sweeps.with_short_names().frame.assign(folder=sweeps.frame["sweep"])), where
    )
    if rows.empty:
        every = f"{counted(len(sweeps.frame), 'row')} in {counted(len(sweeps.environments), 'sweep')}"
        raise QueryError(f"--where: none of {every} meets every condition")
    shown = _sweeps(rows)
    shown = shown.iloc[-last:] if last else shown
    place = pd.Series(range(len(shown)), index=shown["name"])
    frame = rows.assign(place=rows["sweep"].map(place)).dropna(subset="place")
    frame = add_cell_keys(frame.sort_values("place", kind="stable", ignore_index=True), identity_keys(rows))
    kind_of_row = [SEVERITY[spec.name] for spec in outcomes(frame)]
    frame = frame.assign(cell=pd.factorize(frame["key"])[0], kind=kind_of_row)
    for name in filter(METRICS.__contains__, metrics):
        frame[name] = frame[name].where(are_comparable(frame, frame, name))
    runs = frame.astype(dict.fromkeys(metrics, float)).groupby(["cell", "place"])
    worst = runs["kind"].min()
    kinds = worst.unstack().reindex(columns=range(len(shown))).fillna(NO_RUN).to_numpy(dtype=np.int8)
    medians = [
        runs[name].median().unstack().reindex(columns=range(len(shown))).to_numpy() for name in metrics
    ]
    # The rate of false alarms is for the series of all metrics together.
    changes_of_series = iter(find_change_points(np.concatenate(medians)))
    by_metric = zip(metrics, medians, strict=True)
    cost_of = [
        [Cost(name, values, next(changes_of_series)) for values in matrix] for name, matrix in by_metric
    ]
    cells = frame.drop_duplicates("key").set_index("cell")
    names, axes = names_of_cells(cells), plain_rows(cells[[*AXES, "others", "config_digest"]])
    # The reason of the first worst run in the last sweep that has the cell.
    last_of = worst.reset_index().drop_duplicates("cell", keep="last")
    bad = frame[["cell", "place", "kind", "reason"]].merge(last_of, on=["cell", "place", "kind"])
    reasons = [*bad.drop_duplicates("cell").sort_values("cell")["reason"].fillna("")]
    reconfigured = _reconfigured(cells, kinds)
    replaced = {before for before, _ in reconfigured.values()}
    histories = [
        CellHistory(
            names[number],
            axes[number],
            tuple(kinds[number].tolist()),
            [costs[number] for costs in cost_of],
            reasons[number],
            reconfigured.get(number, (0, None))[1],
            number in replaced,
        )
        for number in range(len(cells))
    ]
    return History(shown, sorted(histories, key=lambda cell: (-cell.last_change, cell.current_status.ok)))


def group_by_display(
    cells: Sequence[CellHistory], visible: int, every: bool = False
) -> dict[str, list[CellHistory]]:
    """Group the cells by how they are shown if only the newest `visible` sweeps are.

    `shown`: cells that are not ok, or changed in these sweeps; all cells if `every`, or if there is one
    sweep. The others are ok: `steady` without any change, `earlier` with an earlier change, `replaced` by
    another configuration, or `absent` from these sweeps.
    """

    def group(cell: CellHistory) -> str:
        first = max(0, len(cell.kinds) - visible)
        if every or len(cell.kinds) == 1:
            return "shown"
        if cell.present_in[-1] < first or cell.replaced:
            return "replaced" if cell.present_in[-1] >= first else "absent"
        if not cell.current_status.ok or cell.last_change >= first:
            return "shown"
        return "steady" if cell.last_change < 0 else "earlier"

    groups = defaultdict(list)
    for cell in cells:
        groups[group(cell)].append(cell)
    return groups


def _sweeps(rows: pd.DataFrame) -> pd.DataFrame:
    """Return one row per sweep, in order of time."""
    known = rows[["sweep", "folder", "started_at", "torch_version", *COMMITS]].drop_duplicates()
    by_sweep = known.sort_values("started_at", kind="stable").groupby("sweep")
    first = by_sweep.first()
    commits = {name: merged_commits(of.dropna()) for name, of in by_sweep["target_commit"]}
    first["target_commit"] = pd.Series(commits, dtype="string")
    # If no row has its start, the time of the file's last change is used.
    written = [Path(folder, RESULTS_JSONL).stat().st_mtime for folder in first["folder"]]
    times = [datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds") for at in written]
    began = first["started_at"].fillna(pd.Series(times, first.index, dtype="string"))
    first = first.assign(began=began).rename_axis("name").reset_index()
    return first.sort_values(["began", "name"], kind="stable", ignore_index=True).drop(columns="began")


def _reconfigured(
    cells: pd.DataFrame, kinds: npt.NDArray[np.int8]
) -> dict[int, tuple[int, dict[str, tuple[str, str]]]]:
    """Return for each cell that replaced another at its address: the last such cell, and the keys in which
    their configurations differ, with both values."""
    seen = kinds != NO_RUN
    first, last = seen.argmax(axis=1), kinds.shape[1] - 1 - seen[:, ::-1].argmax(axis=1)
    replaced = {}
    for numbers in cells.groupby("address").groups.values():
        for number in numbers if len(numbers) > 1 else ():
            earlier = [earlier_number for earlier_number in numbers if last[earlier_number] < first[number]]
            if earlier:
                before = max(earlier, key=lambda earlier_number: last[earlier_number])
                keys = config_differences(cells["config"][before], cells["config"][number])
                replaced[int(number)] = (int(before), keys)
    return replaced
