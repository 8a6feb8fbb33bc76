"""A learning rate that is a tensor, and that a scheduler has changed in the optimizer's defaults too, has its
initial value there after a load (docs/findings/tensor-lr-in-defaults.md)."""

import re
from collections.abc import Iterator

from dcpbench.cell.cell import Cell
from dcpbench.cell.explained import Differences
from dcpbench.config.schema import Config
from dcpbench.core.defects import Defect, Moment
from dcpbench.core.state import StatePart
from dcpbench.plugins.defects._cells import new_target
from dcpbench.verify.compare import same_leaves
from dcpbench.verify.snapshot import DigestedLeaf, TensorLeaf
from dcpbench.workloads.run_state import State, live_state

_SHARED = "shared_memory"
_RATE = r"param_groups\.\d+\.lr"


def _applies(config: Config) -> bool:
    return not config.own_trainer


def _expected(cell: Cell, moment: Moment, reference: Differences) -> Iterator[State]:
    saved = reference.checkpoint.state
    concerned = any(name.startswith("defaults.") for name in reference.names.get(StatePart.flags, ()))
    if not any(cell.world.gathered(concerned)):
        return
    initial, defaults = live_state(new_target(cell))[StatePart.flags], in_defaults(saved)
    if defaults:
        unshared = {_SHARED: without_rates(saved[StatePart.flags][_SHARED])}
        yield {StatePart.flags: {name: leaf for name, leaf in initial.items() if name in defaults} | unshared}


def in_defaults(saved: State) -> set[str]:
    """Return the names of default learning rates that are tensors with the value of a group."""
    groups = [leaf for name, leaf in saved[StatePart.optimizer].items() if re.fullmatch(_RATE, name)]
    rates = [leaf for leaf in groups if isinstance(leaf, TensorLeaf | DigestedLeaf)]
    flags = saved[StatePart.flags].items()
    defaults = {name: leaf for name, leaf in flags if re.fullmatch(r"defaults\.(\d+\.)?lr", name)}
    return {
        name for name, leaf in defaults.items() if any(same_leaves({"": one}, {"": leaf}) for one in rates)
    }


def without_rates(shared: str) -> str:
    """Leave out learning rates of groups from a text of tensors that share memory. A load gives each group
    a tensor of its own."""
    return "; ".join(one for one in shared.split("; ") if not re.fullmatch(rf"{_RATE}(, {_RATE})*", one))


defect = Defect(("restored",), _applies, _expected)
