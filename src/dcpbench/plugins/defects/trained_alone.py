"""Replicas that never average their gradients: each has the gradients of its share of the batch
(docs/findings/hsdp-one-shard.md)."""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from dcpbench.cell.cell import Cell
from dcpbench.core.defects import Defect, Moment
from dcpbench.plugins.defects._cells import never_averages

if TYPE_CHECKING:
    from dcpbench.twin.gradients import TwinGradient, TwinGradients


def _expected(
    cell: Cell, moment: Moment, reference: "TwinGradients"
) -> Iterator[dict[str, dict[str, "TwinGradient"]]]:
    own_gradients, ranks = reference.local, cell.world.size
    yield {
        reference.check: {
            name: replace(twin, mean=own_gradients[name].to(twin.mean.device) / ranks, factor_tolerance=None)
            for name, twin in reference.twins.items()
            if name in own_gradients
        }
    }


defect = Defect(("twin",), never_averages, _expected)
