"""An optimizer set from a full state dict has lists instead of tuples
(docs/findings/full-state-dict-tuples.md)."""

from collections.abc import Iterator

from dcpbench.cell.cell import Cell
from dcpbench.cell.known_defects import LoadReference
from dcpbench.core.defects import Defect, Moment
from dcpbench.core.state import StatePart
from dcpbench.plugins.defects._cells import gathers_state_dicts
from dcpbench.state.snapshot import State

_PART = StatePart.optimizer


def _expected(cell: Cell, moment: Moment, reference: LoadReference) -> Iterator[State]:
    saved = reference.checkpoint.state.get(_PART, {})
    yield {_PART: {name: [*leaf] for name, leaf in saved.items() if isinstance(leaf, tuple)}}


defect = Defect(("restored",), gathers_state_dicts, _expected)
