"""A load does not give the group of an optimizer that has no parameters its saved hyperparameters: it removes
them or, from a full state dict, leaves others (docs/findings/empty-param-group.md)."""

from collections.abc import Iterator

from dcpbench.cell.cell import Cell
from dcpbench.cell.known_defects import LoadReference
from dcpbench.compare.leaves import ABSENT_LEAF
from dcpbench.core.defects import Defect, Moment
from dcpbench.core.state import StatePart
from dcpbench.plugins.defects._cells import loads_by_dcp
from dcpbench.state.snapshot import State, names_parameters

_PART = StatePart.optimizer


def _expected(cell: Cell, moment: Moment, reference: LoadReference) -> Iterator[State]:
    saved, actual = reference.checkpoint.state.get(_PART, {}), reference.actual
    empty = {name[:2] for name, leaf in saved.items() if names_parameters(name, leaf) and not leaf}
    values = actual.get(_PART, {})
    of_group = {name: values.get(name, ABSENT_LEAF) for name in saved if name[:2] in empty}
    flags = actual.get(StatePart.flags, {})
    keys = {name: flags.get(name, ABSENT_LEAF) for name in ((*group, "keys") for group in empty)}
    yield {_PART: of_group, StatePart.flags: keys}


defect = Defect(("restored",), loads_by_dcp, _expected)
