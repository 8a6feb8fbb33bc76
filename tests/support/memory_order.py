"""Models in channels_last, whose moments FSDP1 loads wrongly, and other defects."""

from typing import Any

import torch
from torch import nn

from dcpbench.workloads.workload import Workload
from support.ordinary_workloads import SAMPLES, channels_last, forgetful, reversed_loss


def channels_last_and_wrong() -> Workload:
    """Has a load that changes one moment more."""

    def wrong(optimizer: torch.optim.Optimizer) -> None:
        for entries in [*optimizer.state.values()][:1]:
            entries["exp_avg"].add_(1)

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        adam = torch.optim.Adam(model.parameters())
        adam.register_load_state_dict_post_hook(wrong)
        return adam

    made = channels_last()
    return Workload(made.model, made.batch, reversed_loss, optimizer)


def channels_last_and_forgetful() -> Workload:
    """Has a counter that no checkpoint contains."""
    model = forgetful(nn.Sequential)(nn.Conv2d(4, 4, 3, padding=1), nn.GELU())

    def batch(generator: torch.Generator) -> Any:
        return torch.rand(SAMPLES, 4, 5, 5, generator=generator)

    return Workload(model.to(memory_format=torch.channels_last), batch, reversed_loss)
