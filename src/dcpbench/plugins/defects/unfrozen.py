"""Gradients of frozen parameters that FSDP1 trains under TP: those of a twin that trains them, too
(docs/findings/fsdp1-tp-unfreezes.md)."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from dcpbench.cell.cell import Cell
from dcpbench.core.defects import Defect, Moment
from dcpbench.plugins.defects._cells import has_tensor_parallel_fsdp1

if TYPE_CHECKING:
    from dcpbench.twin.gradients import TwinGradient, TwinGradients


def _expected(
    cell: Cell, moment: Moment, reference: "TwinGradients"
) -> Iterator[dict[str, Mapping[str, "TwinGradient"]]]:
    yield {reference.check: reference.twins}


defect = Defect(("twin",), has_tensor_parallel_fsdp1, _expected)
