"""A load converts the state of an optimizer to the dtype of its parameters
(docs/findings/state-in-low-precision.md)."""

from collections.abc import Iterator
from dataclasses import replace

from dcpbench.cell.cell import Cell
from dcpbench.cell.known_defects import LoadReference
from dcpbench.core.defects import Defect, Moment
from dcpbench.core.state import StatePart
from dcpbench.plugins.defects._cells import has_bf16_model
from dcpbench.state.snapshot import State, TensorLeaf

_PART = StatePart.optimizer


def _expected(cell: Cell, moment: Moment, reference: LoadReference) -> Iterator[State]:
    saved, actual = (state.get(_PART, {}) for state in (reference.checkpoint.state, reference.actual))
    model = reference.actual[StatePart.model].values()
    dtypes = {leaf.dtype for leaf in model if isinstance(leaf, TensorLeaf)}
    rounded = {
        name: replace(leaf, local=leaf.local.to(actual[name].dtype))
        for name, leaf in saved.items()
        if isinstance(leaf, TensorLeaf) and getattr(actual.get(name), "dtype", None) in dtypes
    }
    yield {_PART: rounded}


defect = Defect(("restored",), has_bf16_model, _expected)
