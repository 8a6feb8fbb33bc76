"""One side compared with an old one: statuses, configurations, costs, and all of them as one flat table."""

from collections.abc import Collection
from dataclasses import dataclass

import pandas as pd

from dcpbench.analysis.cell_identity import (
    config_differences,
    identity_keys_of,
    not_in_common,
    refuse_merged,
    with_cells,
)
from dcpbench.analysis.costs import CHANGED, Rule, costs, is_regression
from dcpbench.analysis.status_changes import CHANGES, OTHER_CONFIGURATION, SAME, changes
from dcpbench.records.row import AXES

FAIL_ON = (*(change.replace(" ", "-") for change in CHANGES), "failing", *CHANGED, "regressions")
"""The kinds of changes by the names that a command line gives them. `failing`: a cell of the new side is not
ok, be it new or not. `regressions`: a cost that is worse."""


@dataclass(frozen=True)
class Comparison:
    """The differences of one side, `name`, from the old one.

    Args:
        statuses: see `status_changes.changes`.
        configurations: a line for each cell of another configuration (`key`) and each key in which it differs
            (`name`), with both values as text.
        costs: see `costs.costs`.
        cells: the axes of each cell by its key.
        apart: why there is no cell in common, empty if there is one.
    """

    name: str
    statuses: pd.DataFrame
    configurations: pd.DataFrame
    costs: pd.DataFrame
    cells: pd.DataFrame
    apart: str

    def kinds(self) -> set[str]:
        """The kinds of changes that there are, out of `FAIL_ON`."""
        found = {*self.statuses["change"], *self.costs["verdict"]} - {SAME}
        found |= {"failing"} if self.statuses["failing"].any() else set()
        found |= {"regressions"} if is_regression(self.costs).any() else set()
        return {kind.replace(" ", "-") for kind in found} & set(FAIL_ON)

    def flat(self) -> pd.DataFrame:
        """All of it as one table: lines of the metric `status`, then of `configuration`, then of costs."""
        statuses = self.statuses.drop(columns="before").rename(columns={"change": "verdict"})
        parts = [
            statuses.assign(metric="status", level="cell"),
            self.configurations.assign(metric="configuration", level="cell", verdict=OTHER_CONFIGURATION),
            self.costs.astype({"old": object, "new": object}),
        ]
        lines = pd.concat([part for part in parts if len(part)], ignore_index=True)
        lines = lines.reindex(columns=[*dict.fromkeys(name for part in parts for name in part)])
        axes = self.cells.reindex(lines["key"]).reset_index(drop=True)
        first = ["metric", "level", "name", *axes.columns, "old", "new", "verdict"]
        table = pd.concat([lines.drop(columns="key"), axes], axis=1)
        table = table[[*first, *(name for name in table.columns if name not in first)]]
        table.insert(0, "against", self.name)
        return table


def compared(
    name: str,
    old: pd.DataFrame,
    new: pd.DataFrame,
    rule: Rule,
    ignored: Collection[str] = (),
    earlier: pd.DataFrame | None = None,
) -> Comparison:
    """Compare the rows of one side with those of an old one.

    Args:
        old, new: rows as `frame.read_sweeps` gives them.
        ignored: axes and overrides by which cells are not to be distinguished.
        earlier: rows of sweeps before the old one, whose costs count with it.

    Raises:
        dcpbench.analysis.query.QueryError: what is ignored tells cells of one sweep apart.
    """
    sides = {"earlier": earlier, "old": old, "new": new}
    rows = pd.concat([side.assign(side=of) for of, side in sides.items() if side is not None and len(side)])
    cells = with_cells(rows.reset_index(drop=True), identity_keys_of(rows), ignored)
    measured, after = cells[cells["side"] != "new"], cells[cells["side"] == "new"]
    before = cells[cells["side"] == "old"]
    for side in (measured, after):
        refuse_merged(side, ignored)
    statuses = changes(before, after)
    once = pd.concat([after, before]).drop_duplicates("key").set_index("key")
    axes = [axis for axis in (*AXES, "others") if axis not in ignored]
    return Comparison(
        name,
        statuses,
        _configurations(statuses, once, ignored),
        costs(measured, after, rule),
        once[axes],
        "" if set(before["address"]) & set(after["address"]) else not_in_common(before, after),
    )


def _configurations(statuses: pd.DataFrame, cells: pd.DataFrame, ignored: Collection[str]) -> pd.DataFrame:
    changed = statuses[statuses["change"] == OTHER_CONFIGURATION]
    configs = cells["config"].to_dict()
    lines = [
        (key, name, *values)
        for key, before in zip(changed["key"], changed["before"], strict=True)
        for name, values in config_differences(configs[before], configs[key], ignored).items()
    ]
    return pd.DataFrame(lines, columns=["key", "name", "old", "new"])
