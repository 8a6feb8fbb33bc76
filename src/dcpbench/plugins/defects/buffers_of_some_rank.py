"""Buffers differ by rank; a checkpoint contains each from one rank (docs/findings/buffers-of-some-rank.md).

A resumed run is explained only if it is exact with the saved buffers, so that nothing else is wrong."""

from collections.abc import Iterator

from dcpbench.cell.cell import Cell
from dcpbench.cell.explained import Restored, Resumed, StoredFiles
from dcpbench.config.schema import Config
from dcpbench.core.defects import Defect, Moment
from dcpbench.plugins.defects._loads import exact_with
from dcpbench.verify.compare_layouts import gathered
from dcpbench.verify.snapshot import Leaves, TensorLeaf, digested, persistent_buffers
from dcpbench.workloads.run_state import State, buffers_of
from dcpbench.workloads.training_run import TrainingRun

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
        yield from _resumed(cell, reference)


def _of_each_rank(cell: Cell, part: str, buffers: Leaves, wrong: frozenset[str]) -> Iterator[State]:
    """Yield the buffers of each rank, of those that are wrong on any rank; collective."""
    names = frozenset[str]().union(*gathered(wrong, cell.world.group))
    mine = {name: leaf for name, leaf in buffers.items() if name in names}
    yield from gathered({part: mine}, cell.world.group)


def _resumed(cell: Cell, reference: Resumed) -> Iterator[State]:
    """Train on as loaded, if this rank's saved buffers make that exact."""
    report, saved = cell.report.checks.get(_CHECK), reference.checkpoint.state.get(_CHECK, {})
    found = report.distinct.values() if report else ()
    wrong = {one.name for one in found if one.by == _BY and one.where == str(reference.checkpoint)}
    copied = all(isinstance(saved.get(name), TensorLeaf) for name in wrong)
    everywhere = cell.world.gathered((bool(wrong), copied))
    if not any(some for some, _ in everywhere) or not all(copied for _, copied in everywhere):
        return

    def mend(run: TrainingRun) -> None:
        for name, buffer in persistent_buffers(run.model).items():
            if name in wrong:
                buffer.copy_(saved[name].local)

    yield from exact_with(cell, reference, mend)


defect = Defect(("restored", "stored", "resumed"), _applies, _expected, from_before=False)
