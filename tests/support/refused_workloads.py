"""Workloads that FSDP refuses or changes, and others that look like them."""

import math
from dataclasses import replace

import torch
from torch import nn

from dcpbench.workloads.workload import Workload
from support.ordinary_workloads import Blocks, blocks, forgetful, inputs, net, reversed_loss
from support.user_steps import averaged_model


def groups_by_dimension() -> Workload:
    """Has weight decay for matrices only."""

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        matrices = [one for one in model.parameters() if one.ndim > 1]
        others = [one for one in model.parameters() if one.ndim <= 1]
        groups = {"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}
        return torch.optim.AdamW([group for group in groups if group["params"]], 0.01)

    return Workload(net(), inputs, reversed_loss, optimizer)


def groups_by_type() -> Workload:
    """Has weight decay in a wrapped model only."""

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        decay = 0.0 if type(model) is nn.Sequential else 0.1
        return torch.optim.AdamW(model.parameters(), 0.01, weight_decay=decay)

    return Workload(net(), inputs, reversed_loss, optimizer)


def average_of_a_model_without_copies() -> Workload:
    """Has a model that cannot be copied without FSDP either."""
    made = averaged_model()
    made.model.functions = math  # type: ignore[assignment]
    return made


def frozen_in_the_plan(counts: bool = False) -> Workload:
    """Has a frozen block that its TP plan names; if it `counts`, also a counter that no checkpoint has."""
    model = forgetful(Blocks)() if counts else Blocks()
    model.get_submodule("model.layers.0").requires_grad_(False)
    return replace(blocks(), model=model)


def frozen_in_the_plan_and_forgetful() -> Workload:
    return frozen_in_the_plan(counts=True)
