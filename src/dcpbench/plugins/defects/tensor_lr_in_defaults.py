"""A learning rate that is a tensor, and that a scheduler has changed in the optimizer's defaults too, has its
initial value there after a load (docs/findings/tensor-lr-in-defaults.md)."""

from collections.abc import Collection, Iterator

from dcpbench.cell.cell import Cell
from dcpbench.cell.known_defects import LoadReference
from dcpbench.compare.leaves import same_leaves
from dcpbench.core.defects import Defect, Moment
from dcpbench.core.state import Name, StatePart, text_of
from dcpbench.plugins.defects._cells import new_target, runs_own_loop
from dcpbench.state.snapshot import DigestedLeaf, Leaves, State, TensorLeaf

_SHARED: Name = ("shared_memory",)


def _expected(cell: Cell, moment: Moment, reference: LoadReference) -> Iterator[State]:
    saved = reference.checkpoint.state
    concerned = any(name[0] == "defaults" for name in reference.names.get(StatePart.flags, ()))
    if not cell.world.any_rank(concerned):
        return
    initial, defaults = new_target(cell).live_state()[StatePart.flags], in_defaults(saved)
    if defaults:
        rates = {text_of(name) for name in _rates(saved[StatePart.optimizer], "param_groups")}
        shared = without_rates(saved[StatePart.flags][_SHARED], rates)
        yield {
            StatePart.flags: {name: initial[name] for name in defaults & initial.keys()} | {_SHARED: shared}
        }


def in_defaults(saved: State) -> set[Name]:
    """Return the names of default learning rates that are tensors with the value of a group."""
    groups = _rates(saved[StatePart.optimizer], "param_groups").values()
    rates = [leaf for leaf in groups if isinstance(leaf, TensorLeaf | DigestedLeaf)]
    defaults = _rates(saved[StatePart.flags], "defaults")
    return {
        name for name, leaf in defaults.items() if any(same_leaves({(): rate}, {(): leaf}) for rate in rates)
    }


def _rates(leaves: Leaves, where: str) -> Leaves:
    return {name: leaf for name, leaf in leaves.items() if name[0] == where and name[-1] == "lr"}


def without_rates(shared: str, rates: Collection[str]) -> str:
    """Leave out the learning `rates` of groups from a text of tensors that share memory. A load gives each
    group a tensor of its own."""
    return "; ".join(
        shared_names for shared_names in shared.split("; ") if not {*shared_names.split(", ")} <= {*rates}
    )


defect = Defect(("restored",), runs_own_loop, _expected)
