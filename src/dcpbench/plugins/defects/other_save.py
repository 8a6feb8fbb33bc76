"""Saves that are in flight at once and share a stager (docs/findings/shared-stager.md) or a writer
(docs/findings/shared-writer.md): the saved or loaded state is that of another save."""

from collections.abc import Iterator

from dcpbench.cell.cell import Cell
from dcpbench.cell.explained import Differences
from dcpbench.core.defects import Defect, Moment
from dcpbench.plugins.defects._cells import shares_stager_or_writer
from dcpbench.workloads.run_state import State, StateByKey


def _expected(cell: Cell, moment: Moment, reference: Differences) -> Iterator[State | StateByKey]:
    for other in reference.checkpoint.overlapping:
        yield other.state if moment == "restored" else other.by_key


defect = Defect(("restored", "stored"), shares_stager_or_writer, _expected)
