"""Experts over one rank by `fully_shard`: gradients that are reduced by sums are divided twice
(docs/findings/gradient-divide-factor.md)."""

from collections.abc import Iterator
from dataclasses import replace

from dcpbench.cell.cell import Cell
from dcpbench.config.schema import Config
from dcpbench.core.defects import Defect, Moment
from dcpbench.verify.training import TwinGradient, TwinGradients


def _applies(config: Config) -> bool:
    return bool(config.parallel.options.get("sums"))


def _expected(
    cell: Cell, moment: Moment, reference: TwinGradients
) -> Iterator[dict[str, dict[str, TwinGradient]]]:
    experts = tuple(f"{name}." for name in cell.config.parallel.ep_plan)
    divided = {name: twin for name, twin in reference.twins.items() if name.startswith(experts)}
    ranks = cell.world.size
    yield {reference.check: {name: replace(twin, mean=twin.mean / ranks) for name, twin in divided.items()}}


defect = Defect(("twin",), _applies, _expected)
