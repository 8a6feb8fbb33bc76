"""An optimizer that has state before its first step gets none of the rest from a load
(docs/findings/touched-optimizer-state.md)."""

from collections.abc import Iterator

from dcpbench.cell.cell import Cell
from dcpbench.cell.checkpoint import Checkpoint
from dcpbench.cell.known_defects import LoadReference
from dcpbench.compare.leaves import ABSENT_LEAF
from dcpbench.core.defects import Defect, Moment
from dcpbench.core.state import StatePart
from dcpbench.plugins.defects._cells import fsdp1_sizes, loads_by_dcp, new_target
from dcpbench.runs.own_run import OwnRun
from dcpbench.state.snapshot import Leaves, State

_PART = StatePart.optimizer


def _expected(cell: Cell, moment: Moment, reference: LoadReference) -> Iterator[State]:
    """Yield that saved state is absent if a new optimizer has some state, but not this."""
    wrong = reference.names.get(_PART, frozenset())
    if not cell.world.any_rank(any(name[0] == "state" for name in wrong)):
        return
    target = new_target(cell)
    if not target.optimizer.state:
        return
    target.fill_optimizer()
    names, saved = target.live_state()[_PART].keys(), reference.checkpoint.state.get(_PART, {})
    yield {_PART: {name: ABSENT_LEAF for name in saved if name[0] == "state" and name not in names}}
    if fsdp1_sizes(cell.config) and not any(target.optimizer.state.values()):
        yield {_PART: _set_again(cell, target, reference.checkpoint)}


def _set_again(cell: Cell, target: OwnRun, checkpoint: Checkpoint) -> Leaves:
    """Return an optimizer's state after a load of its own state dict. Under FSDP1 the load has removed empty
    entries, so DCP takes its step of new optimizers, with the restored weights and hyperparameters."""
    saved, live = checkpoint.tensors("model", target, cell.checkpointer)
    for name, tensor in live.items():
        tensor.copy_(saved[name])
    leaves = checkpoint.state[_PART]
    for number, group in enumerate(target.optimizer.param_groups):
        keys = group.keys() - {"params"}
        group |= {key: leaves.get(("param_groups", number, key), group[key]) for key in keys}
    target.optimizer.state.clear()
    target.fill_optimizer()
    return target.live_state()[_PART]


defect = Defect(("restored",), loads_by_dcp, _expected)
