"""The history of cells: a matrix of cells by sweeps, and for each cell what changed at which sweep."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from dcpbench.analysis.cell_identity import cell_names, config_differences, with_cells
from dcpbench.analysis.change_points import Change, changes
from dcpbench.analysis.frame import is_false, is_true
from dcpbench.analysis.history_rows import Rows
from dcpbench.records.row import AXES
from dcpbench.records.store import RESULTS_JSONL


@dataclass(frozen=True)
class Kind:
    """The status of a cell in a sweep; its letter is that of report.html. `ok`: by the rule of the sweep's
    exit status. `status` names its style."""

    letter: str
    label: str
    ok: bool
    status: str


KINDS = (
    Kind("?", "unknown", False, "unknown"),
    Kind("M", "fault missed", False, "fail"),
    Kind("C", "crash", False, "crash"),
    Kind("T", "timeout", False, "timeout"),
    Kind("E", "error", False, "error"),
    Kind("F", "fail", False, "fail"),
    Kind("V", "vacuous", False, "vacuous"),
    Kind("~", "flaky", False, "fail"),
    Kind("X", "xpass", False, "xpass"),
    Kind("x", "xfail", True, "xfail"),
    Kind("S", "skip", True, "skip"),
    Kind("D", "fault detected", True, "pass"),
    Kind("P", "pass", True, "pass"),
    Kind("·", "no row", True, "skip"),
)
"""The worst first; the last is for a sweep in which a cell has no row."""

ABSENT = len(KINDS) - 1
_OF_LABEL = {kind.label: number for number, kind in enumerate(KINDS[:ABSENT])}

Numbers = npt.NDArray[np.int8]


def kind_numbers(frame: pd.DataFrame) -> Numbers:
    """For each row which of `KINDS` it is: one whose second try had another status is flaky, whatever that
    was, and a planted fault is seen or missed."""
    known = frame["status"].astype("category")
    of_status = np.array([_OF_LABEL.get(status, 0) for status in known.cat.categories] + [0], dtype=np.int8)
    kinds = of_status[known.cat.codes.to_numpy()]
    kinds[is_true(frame["fault_seen"]).to_numpy()] = _OF_LABEL["fault detected"]
    kinds[is_false(frame["fault_seen"]).to_numpy()] = _OF_LABEL["fault missed"]
    kinds[is_true(frame["flaky"]).to_numpy()] = _OF_LABEL["flaky"]
    return kinds


@dataclass(frozen=True)
class History:
    """Cells over sweeps, these in order of time, which is that of their first cell's start.

    Args:
        sweeps: a row a sweep: `name`, `folder`, `started_at`, `git_commit`, `torch_version`, the last three
            missing where no row says so.
        cells: a row a cell: its axes as text, `others`, the overrides that no axis shows, and
            `config_digest`, if it is known.
        kinds: (cells, sweeps), places in `KINDS`: the worst of a cell's runs, or `ABSENT`.
        costs: by metric, medians of a cell's runs (cells, sweeps), NaN where not measured.
        reasons: for each cell why its worst run in the last of its sweeps did not pass, or nothing.
        reconfigured: by cell that is another one's address with another configuration: which cell was there
            before, and the keys in which they differ with both values.
    """

    sweeps: pd.DataFrame
    cells: pd.DataFrame
    kinds: Numbers
    costs: dict[str, npt.NDArray[np.float64]]
    reasons: list[str]
    reconfigured: dict[int, tuple[int, dict[str, tuple[str, str]]]]


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
        kinds: for each sweep its place in `KINDS`.
        last_seen: the last sweep that has it.
        since: the sweep from which on it has its present status; None if it never had another one.
        before: the status before that.
        reconfigured: from the first sweep on that has it, it takes the place of a cell with these
            differences in its configuration; None if it takes no other's place.
        replaced: another configuration has taken its place since.
    """

    number: int
    name: str
    kinds: tuple[int, ...]
    last_seen: int
    since: int | None
    before: Kind | None
    costs: list[Cost]
    reason: str
    reconfigured: dict[str, tuple[str, str]] | None = None
    replaced: bool = False

    @property
    def now(self) -> Kind:
        """Its status in the last sweep that has it."""
        return KINDS[self.kinds[self.last_seen]]

    @property
    def first_seen(self) -> int:
        """The first sweep that has it."""
        return next(at for at, kind in enumerate(self.kinds) if kind != ABSENT)

    @property
    def changed(self) -> int:
        """The last sweep at which its status, configuration or a cost changed; -1 if there is none."""
        of_costs = [change.at for cost in self.costs for change in cost.changes]
        of_configuration = -1 if self.reconfigured is None else self.first_seen
        return max([-1 if self.since is None else self.since, of_configuration, *of_costs])


def history(rows: Rows, metrics: Sequence[str], last: int | None = None) -> History:
    """The history of these rows, of the newest sweeps if not of all; each metric is a column."""
    sweeps = _sweeps(rows)
    kept = sweeps.iloc[-last:] if last else sweeps
    place = pd.Series(range(len(kept)), index=kept.index)
    frame = rows.frame.assign(place=rows.frame["at"].map(place)).dropna(subset="place")
    frame = with_cells(frame.sort_values("place", kind="stable", ignore_index=True), rows.keys)
    frame = frame.assign(cell=pd.factorize(frame["key"])[0], kind=kind_numbers(frame))
    runs = frame.groupby(["cell", "place"])
    worst = runs["kind"].min()
    kinds = _matrix(worst, len(kept)).fillna(ABSENT).to_numpy(dtype=np.int8)
    medians = frame[[*metrics]].astype(float).groupby([frame["cell"], frame["place"]]).median()
    cells = frame.drop_duplicates("key").drop(columns="config_digest").set_index("cell")
    cells = cells.join(frame.groupby("cell")["config_digest"].first())
    return History(
        kept.reset_index(drop=True),
        cells[[*AXES, "others", "config_digest"]],
        kinds,
        {name: _matrix(medians[name], len(kept)).to_numpy() for name in metrics},
        _reasons(frame, worst),
        _reconfigured(rows, cells, kinds, list(kept.index)),
    )


def cell_histories(found: History) -> list[CellHistory]:
    """All cells: what changed last comes first, and of these what is not ok."""
    of_costs = _changes(found)
    replaced = {before for before, _ in found.reconfigured.values()}
    cells = [
        CellHistory(
            number,
            name,
            tuple(map(int, found.kinds[number])),
            *_statuses(found.kinds[number]),
            [Cost(key, values[number], of_costs[key][number]) for key, values in found.costs.items()],
            found.reasons[number],
            found.reconfigured.get(number, (0, None))[1],
            number in replaced,
        )
        for number, name in enumerate(cell_names(found.cells))
    ]
    return sorted(cells, key=lambda cell: (-cell.changed, cell.now.ok, cell.number))


@dataclass(frozen=True)
class Folded:
    """Which cells are `shown` one by one: those that are not ok, and those in which something changed in
    the sweeps that are visible. The others are ok now: `steady` all along, or since something changed
    `earlier`. Cells that none of the visible sweeps has are nowhere, and `replaced` ones only here."""

    shown: list[CellHistory]
    steady: list[CellHistory]
    earlier: list[CellHistory]
    replaced: list[CellHistory]


def folded(cells: Sequence[CellHistory], visible: int, every: bool = False) -> Folded:
    """What is shown of these cells where so many of the newest sweeps are visible; all if `every`, or if
    there is but one sweep."""
    if every or not cells or len(cells[0].kinds) == 1:
        return Folded(list(cells), [], [], [])
    first = max(0, len(cells[0].kinds) - visible)
    there = [cell for cell in cells if cell.last_seen >= first]
    present = [cell for cell in there if not cell.replaced]
    shown = [cell for cell in present if not cell.now.ok or cell.changed >= first]
    steady = [cell for cell in present if cell.now.ok and cell.changed < 0]
    earlier = [cell for cell in present if cell.now.ok and 0 <= cell.changed < first]
    return Folded(shown, steady, earlier, [cell for cell in there if cell.replaced])


def _sweeps(rows: Rows) -> pd.DataFrame:
    """A row a sweep that has any, in order of time; its index is the number of its folder."""
    columns = ["at", "started_at", "git_commit", "torch_version"]
    known = rows.frame[columns].drop_duplicates().astype(object)
    known = known.where(known.notna(), None).astype({"at": int})
    first = known.sort_values("started_at", kind="stable").groupby("at").first().sort_index()
    first.insert(0, "name", [rows.names[number] for number in first.index])
    first.insert(1, "folder", [str(rows.folders[number]) for number in first.index])
    # Where no row says when it began, that is when the file was last written.
    began = [
        at
        or datetime.fromtimestamp((folder / RESULTS_JSONL).stat().st_mtime, UTC).isoformat(timespec="seconds")
        for at, folder in zip(first["started_at"], map(Path, first["folder"]), strict=True)
    ]
    return first.assign(began=began).sort_values(["began", "name"], kind="stable").drop(columns="began")


def _matrix(values: "pd.Series[Any]", sweeps: int) -> pd.DataFrame:
    """Values of cells in sweeps as a matrix, missing where there is none."""
    return values.unstack().reindex(columns=range(sweeps))


def _reasons(frame: pd.DataFrame, worst: "pd.Series[int]") -> list[str]:
    """For each cell the reason of its worst run in the last sweep that has one of it, the first of them."""
    last = worst.reset_index().drop_duplicates("cell", keep="last")
    runs = frame[["cell", "place", "kind", "reason"]].merge(last, on=["cell", "place", "kind"])
    return [*runs.drop_duplicates("cell").sort_values("cell")["reason"].astype(object).fillna("")]


def _reconfigured(
    rows: Rows, cells: pd.DataFrame, kinds: Numbers, folders: Sequence[int]
) -> dict[int, tuple[int, dict[str, tuple[str, str]]]]:
    """See `History.reconfigured`: a cell comes after the one whose place it took at its address.

    Args:
        folders: for each sweep the number of its folder in `rows`.
    """
    seen = kinds != ABSENT
    first, last = seen.argmax(axis=1), kinds.shape[1] - 1 - seen[:, ::-1].argmax(axis=1)

    def config(number: int) -> Mapping[str, Any]:
        return rows.config(folders[last[number]], config_digest=cells["config_digest"][number])

    found = {}
    for numbers in cells.groupby("address").groups.values():
        for number in numbers if len(numbers) > 1 else ():
            earlier = [other for other in numbers if last[other] < first[number]]
            if earlier:
                before = max(earlier, key=lambda other: last[other])
                found[int(number)] = (int(before), config_differences(config(before), config(number)))
    return found


def _changes(found: History) -> dict[str, list[list[Change]]]:
    """The changes of each metric's series: all of them are looked at together, for one rate."""
    cells = len(found.cells)
    series = changes(np.concatenate(list(found.costs.values())))
    return {name: series[place * cells : (place + 1) * cells] for place, name in enumerate(found.costs)}


def _statuses(kinds: npt.NDArray[np.int8]) -> tuple[int, int | None, Kind | None]:
    """The last sweep that has the cell, the one from which on it has that status, and the one before."""
    seen = np.flatnonzero(kinds != ABSENT)
    turns = np.flatnonzero(kinds[seen][1:] != kinds[seen][:-1])
    if not turns.size:
        return int(seen[-1]), None, None
    return int(seen[-1]), int(seen[turns[-1] + 1]), KINDS[kinds[seen[turns[-1]]]]
