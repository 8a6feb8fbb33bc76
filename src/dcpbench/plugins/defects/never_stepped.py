"""The state of an optimizer was not loaded. It is absent, or the one that DCP gives an optimizer that never
stepped: zeros and a counter of one step (docs/findings/gradients-at-load.md)."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from dcpbench.cell.cell import Cell
from dcpbench.cell.explained import Differences
from dcpbench.config.schema import Config
from dcpbench.core.defects import Defect, Moment
from dcpbench.core.state import Name, StatePart
from dcpbench.verify.compare import ABSENT
from dcpbench.verify.snapshot import Idle, Leaf, Leaves, TensorLeaf
from dcpbench.workloads.run_state import State

_PART = StatePart.optimizer


def _applies(config: Config) -> bool:
    return not config.load_into.filled


def _expected(cell: Cell, moment: Moment, reference: Differences) -> Iterator[State]:
    actual = reference.actual.get(_PART, {})
    names = reference.names.get(_PART, frozenset())
    yield {_PART: never_stepped({name: leaf for name, leaf in actual.items() if name in names})}
    if not any(name[0] == "state" for name in actual):
        yield {_PART: {name: ABSENT for name in names if name[0] == "state"}}


def never_stepped(leaves: Leaves) -> Leaves:
    """Return tensors as they are in an optimizer that has never stepped."""

    def fresh(name: Name, leaf: Leaf) -> Leaf:
        if isinstance(leaf, Idle):
            return Idle(fresh(name, leaf.leaf))
        return replace(leaf, local=torch.full_like(leaf.local, int(name[-1] == "step")))

    tensors = {name: leaf.leaf if isinstance(leaf, Idle) else leaf for name, leaf in leaves.items()}
    return {name: fresh(name, leaves[name]) for name, one in tensors.items() if isinstance(one, TensorLeaf)}


defect = Defect(("restored",), _applies, _expected)
