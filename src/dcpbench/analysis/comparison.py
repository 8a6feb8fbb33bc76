"""One side held against an old one: the verdicts, the costs, and both as one flat table."""

from collections.abc import Collection
from dataclasses import dataclass

import pandas as pd

from dcpbench.analysis.cell_identity import not_in_common, refuse_merged, with_cells
from dcpbench.analysis.costs import CHANGED, Rule, costs
from dcpbench.analysis.frame import AXES
from dcpbench.analysis.status_changes import KINDS, SAME, changes

REGRESSIONS = frozenset({"slower", "larger"})
FAIL_ON = (*(kind.replace(" ", "-") for kind in KINDS), "failing", *CHANGED, "regressions")
"""The kinds of changes by the names that a command line gives them. `failing`: a cell of the new side is not
well, be it new or not. `regressions`: what is slower or larger."""


@dataclass(frozen=True)
class Comparison:
    """`verdicts` is what `verdicts.changes` tells, `costs` what `costs.costs` does; `cells` has the axes of
    each cell by its key. `apart` says why there is no cell in common, and is empty if there is one."""

    name: str
    verdicts: pd.DataFrame
    costs: pd.DataFrame
    cells: pd.DataFrame
    apart: str

    def kinds(self) -> set[str]:
        """The kinds of changes that there are, out of `FAIL_ON`."""
        found = {*self.verdicts["change"], *self.costs["verdict"]} - {SAME}
        found |= {"failing"} if self.verdicts["failing"].any() else set()
        found |= {"regressions"} if found & REGRESSIONS else set()
        return {kind.replace(" ", "-") for kind in found} & set(FAIL_ON)

    def flat(self) -> pd.DataFrame:
        """All of it as one table: lines of the metric `status`, then those of each cost."""
        told = self.verdicts.rename(columns={"change": "verdict"}).assign(metric="status", level="cell")
        lines = pd.concat([told, self.costs.astype({"old": object, "new": object})], ignore_index=True)
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
    """Hold the rows of one side against those of an old one.

    Args:
        old, new: rows as `reading.read_sweeps` gives them.
        ignored: axes and overrides by which cells are not to be told apart.
        earlier: rows of sweeps before the old one, whose costs count with it.

    Raises:
        dcpbench.analysis.query.QueryError: what is ignored tells cells of one sweep apart.
    """
    before, after = (with_cells(side, ignored) for side in (old, new))
    measured = before
    if earlier is not None and len(earlier):
        measured = pd.concat([with_cells(earlier, ignored), before], ignore_index=True)
    for side in (measured, after):
        refuse_merged(side, ignored)
    cells = pd.concat([after, before]).drop_duplicates("key").set_index("key")[[*AXES, "others"]]
    common = set(before["key"]) & set(after["key"])
    return Comparison(
        name,
        changes(before, after),
        costs(measured, after, rule),
        cells.drop(columns=[axis for axis in ignored if axis in cells]),
        "" if common else not_in_common(before, after),
    )
