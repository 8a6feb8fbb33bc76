"""Torch's state-dict functions refuse what they have returned: of a model with a submodule under two names
(docs/findings/module-under-two-names.md), or of optimizers of which some keep no state of a parameter
(docs/findings/stateless-optimizer.md)."""

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.optim import Optimizer

from dcpbench.cell.cell import Cell
from dcpbench.cell.explained import RaisedInLoad
from dcpbench.config.schema import Config
from dcpbench.core.defects import Defect, Moment
from dcpbench.plugins.defects._cells import fsdp1_sizes, loads_by_dcp
from dcpbench.workloads.stateful import ModelState, OptimizerState


def _expected(cell: Cell, moment: Moment, reference: RaisedInLoad) -> Iterator[str]:
    """Load what the target has into itself: as a plain module or optimizer, and by torch's functions."""
    for part in reference.target.state().values():
        plain: Any = None
        if isinstance(part, ModelState) and _has_two_names(part.model):
            plain = part.model
        elif isinstance(part, OptimizerState) and _lacks_state(part.optimizer):
            plain = part.optimizer
        if plain is not None and not _refusal(plain) and (text := _refusal(part)):
            yield text


def _refusal(part: Any) -> str | None:
    try:
        part.load_state_dict(part.state_dict())
    except Exception as error:  # noqa: BLE001 - of any class
        return str(error)
    return None


def _has_two_names(model: nn.Module) -> bool:
    return len([*model.named_modules(remove_duplicate=False)]) > len([*model.modules()])


def _lacks_state(optimizer: Optimizer) -> bool:
    parameters = [value for group in optimizer.param_groups for value in group["params"]]
    return not all(optimizer.state.get(value) for value in parameters if value.requires_grad)


def _applies(config: Config) -> bool:
    """One rank alone may raise, so no state dict may be collective."""
    return loads_by_dcp(config) and not fsdp1_sizes(config) and not config.state_dict.full_state_dict


defect = Defect(("raised",), _applies, _expected)
