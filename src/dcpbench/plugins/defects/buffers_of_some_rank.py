"""Buffers differ by rank; a checkpoint contains each from one rank (docs/findings/buffers-of-some-rank.md).

A resumed run is explained only if it is exact with the saved buffers, so that nothing else is wrong."""

from collections.abc import Iterator

from dcpbench.cell.cell import Cell
from dcpbench.cell.explained import Restored, Resumed, StoredFiles
from dcpbench.config.schema import Config
from dcpbench.core.defects import Defect, Moment
from dcpbench.plugins.defects._loads import exact_with_saved
from dcpbench.verify.compare_layouts import gathered
from dcpbench.verify.snapshot import Leaves, digested
from dcpbench.workloads.run_state import State, buffers_of

_BY, _CHECK = "buffers_of_some_rank", "model_equal"


def _applies(config: Config) -> bool:
    return bool(config.checkpointer.name == "dcp" and not config.own_trainer)


def _expected(cell: Cell, moment: Moment, reference: Restored | StoredFiles | Resumed) -> Iterator[State]:
    if isinstance(reference, Restored):
        buffers = buffers_of(reference.checkpoint.state.get(_CHECK, {}))
        wrong = reference.names.get(_CHECK, frozenset())
        yield from _of_each_rank(cell, _CHECK, digested(buffers), wrong)
    elif isinstance(reference, StoredFiles):
        for part, leaves in enumerate(reference.checkpoint.by_key):
            yield from _of_each_rank(cell, str(part), buffers_of(leaves), reference.names)
    else:
        yield from exact_with_saved(cell, reference, _CHECK, _BY)


def _of_each_rank(cell: Cell, part: str, buffers: Leaves, wrong: frozenset[str]) -> Iterator[State]:
    """Yield the buffers of each rank, of those that are wrong on any rank; collective."""
    names = frozenset[str]().union(*gathered(wrong, cell.world.group))
    mine = {name: leaf for name, leaf in buffers.items() if name in names}
    yield from gathered({part: mine}, cell.world.group)


defect = Defect(("restored", "stored", "resumed"), _applies, _expected, from_before=False)
