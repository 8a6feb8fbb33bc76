"""A scheduler that is created after the load sets hyperparameters again
(docs/findings/scheduler-after-load.md)."""

from collections.abc import Iterator

from dcpbench.cell.cell import Cell
from dcpbench.cell.explained import Differences
from dcpbench.config.schema import Config
from dcpbench.core.defects import Defect, Moment
from dcpbench.core.state import Name, StatePart
from dcpbench.plugins.defects._cells import new_target
from dcpbench.verify.snapshot import below
from dcpbench.workloads.run_state import State, live_state

_PART = StatePart.optimizer


def _applies(config: Config) -> bool:
    return not config.load_into.scheduler


def _expected(cell: Cell, moment: Moment, reference: Differences) -> Iterator[State]:
    """Create one where the groups have the saved values of what they had before the load."""
    target, saved = new_target(cell), reference.checkpoint.state.get(_PART, {})
    for number, group in enumerate(target.optimizer.param_groups):
        prefix: Name = ("param_groups", number)
        had = below(reference.before.get(_PART, {}), prefix).items()
        loaded = {str(name[-1]): saved.get((*prefix, *name), leaf) for name, leaf in had}
        group |= loaded | {"params": group["params"]}
    if later := target.state().get("scheduler"):
        later.load_state_dict(later.state_dict())
    leaves = live_state(target)[_PART]
    yield {_PART: {name: leaf for name, leaf in leaves.items() if name[0] == "param_groups"}}


defect = Defect(("restored",), _applies, _expected, from_before=True)
