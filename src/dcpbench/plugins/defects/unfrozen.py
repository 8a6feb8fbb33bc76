"""FSDP1 + TP: frozen parameters that are sharded by TP are trained (docs/findings/fsdp1-tp-unfreezes.md)."""

from collections.abc import Iterator, Mapping

from dcpbench.cell.cell import Cell
from dcpbench.config.schema import Config
from dcpbench.core.defects import Defect, Moment
from dcpbench.plugins.defects._cells import fsdp1_sizes, unfreeze
from dcpbench.verify.training import TwinGradient, TwinGradients
from dcpbench.workloads.build_run import plan_of


def _applies(config: Config) -> bool:
    return "tp" in fsdp1_sizes(config)


def _expected(
    cell: Cell, moment: Moment, reference: TwinGradients
) -> Iterator[Mapping[str, Mapping[str, TwinGradient]]]:
    plan = plan_of(cell.config, cell.world).tp_plan
    yield {reference.check: reference.after(lambda model: unfreeze(model, plan))}


defect = Defect(("twin",), _applies, _expected)
