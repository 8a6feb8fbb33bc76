"""An optimizer that has state before its first step gets none of the rest from a load
(docs/findings/touched-optimizer-state.md).

A resumed run is explained only if a load into an optimizer that has stepped, and so has all of its state, is
exact, so that nothing else is wrong."""

from collections.abc import Iterator

from dcpbench.cell.cell import Cell
from dcpbench.cell.checkpoint import Checkpoint
from dcpbench.cell.explained import Restored, Resumed
from dcpbench.core.defects import Defect, Moment
from dcpbench.plugins.defects._cells import fsdp1_sizes, loads_by_dcp
from dcpbench.plugins.defects._loads import as_loaded, happened, load_again, new_target, resumes_exactly
from dcpbench.verify.compare import ABSENT
from dcpbench.verify.snapshot import Leaves
from dcpbench.workloads.run_state import State, live_state
from dcpbench.workloads.training_run import TrainingRun

_BY, _CHECK = "touched_optimizer_state", "optim_equal"


def _expected(cell: Cell, moment: Moment, reference: Restored | Resumed) -> Iterator[State]:
    if isinstance(reference, Restored):
        wrong = reference.names.get(_CHECK, frozenset())
        if any(cell.world.gathered(any(name.startswith("state.") for name in wrong))):
            yield from _dropped(cell, reference)
    elif happened(cell, _CHECK, _BY, reference.checkpoint):
        yield from _resumed(cell, reference)


def _dropped(cell: Cell, reference: Restored) -> Iterator[State]:
    """Yield that saved state is absent if a new optimizer has some state, but not this."""
    target = new_target(cell)
    if not target.optimizer.state:
        return
    target.fill_optimizer()
    names, saved = live_state(target)[_CHECK].keys(), reference.checkpoint.state.get(_CHECK, {})
    yield {_CHECK: {name: ABSENT for name in saved if name.startswith("state.") and name not in names}}
    if fsdp1_sizes(cell.config) and not any(target.optimizer.state.values()):
        yield {_CHECK: _set_again(target, reference.checkpoint)}


def _set_again(target: TrainingRun, checkpoint: Checkpoint) -> Leaves:
    """Return an optimizer's state after a load of its own state dict. Under FSDP1 the load has removed empty
    entries, so DCP takes its step of new optimizers, with the restored weights and hyperparameters."""
    saved, live = checkpoint.tensors("model", target)
    for name, value in live.items():
        value.copy_(saved[name])
    leaves = checkpoint.state[_CHECK]
    for number, group in enumerate(target.optimizer.param_groups):
        keys = group.keys() - {"params"}
        group |= {key: leaves.get(f"param_groups.{number}.{key}", group[key]) for key in keys}
    target.optimizer.state.clear()
    target.fill_optimizer()
    return live_state(target)[_CHECK]


def _resumed(cell: Cell, reference: Resumed) -> Iterator[State]:
    """Load and train on: with an optimizer that has stepped, which has to be exact; as loaded; and, under
    FSDP1, as set again."""
    if not cell.config.load_into.scheduler:  # no step can be taken before the load
        return
    if resumes_exactly(cell, load_again(cell, reference, steps=1), reference):
        yield from as_loaded(cell, reference)


defect = Defect(("restored", "resumed"), loads_by_dcp, _expected, from_before=False)
