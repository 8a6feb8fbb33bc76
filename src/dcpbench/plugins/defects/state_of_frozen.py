"""The state of parameters that are frozen at a load is dropped (docs/findings/state-of-frozen.md)."""

from collections.abc import Iterator

from dcpbench.cell.cell import Cell
from dcpbench.cell.known_defects import LoadReference
from dcpbench.compare.leaves import ABSENT_LEAF
from dcpbench.core.defects import Defect, Moment
from dcpbench.core.state import StatePart
from dcpbench.plugins.defects._cells import runs_own_loop
from dcpbench.state.snapshot import EmptyShard, Leaves, State, without_prefix

_PART = StatePart.optimizer


def _expected(cell: Cell, moment: Moment, reference: LoadReference) -> Iterator[State]:
    yield {_PART: without_frozen(reference.checkpoint.state.get(_PART, {}), reference.actual)}


def without_frozen(saved: Leaves, actual: State) -> Leaves:
    """Return the names of saved state of frozen parameters as absent. A parameter with some restored
    state is left out.

    Args:
        actual: the state of the run that loaded, with its flags.
    """
    absent = Leaves()
    for name, requires_grad in actual.get(StatePart.flags, {}).items():
        if name[0] != "requires_grad" or requires_grad is not False:
            continue
        prefix = ("state", name[1])
        if all(
            isinstance(leaf, EmptyShard) for leaf in without_prefix(actual.get(_PART, {}), prefix).values()
        ):
            absent |= {name: ABSENT_LEAF for name in saved if name[:2] == prefix}
    return absent


defect = Defect(("restored",), runs_own_loop, _expected)
