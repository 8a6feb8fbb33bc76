"""Workloads whose functions return several optimizers and schedulers, or build groups in any order, and a
model with a part that is not trained."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, ReduceLROnPlateau, StepLR

from dcpbench.workloads.workload import Workload
from support.ordinary_workloads import inputs, net, reversed_loss


def by_name(model: nn.Module) -> dict[str, Optimizer]:
    first, *others = model.parameters()
    return {"first": SGD([first], 0.05, momentum=0.9), "others": AdamW(others, 0.01)}


def in_a_list(model: nn.Module) -> list[Optimizer]:
    return [*by_name(model).values()]


def schedule_of(optimizer: Optimizer) -> LRScheduler:
    """Choose a schedule by the class, which an optimizer of dcpbench does not have."""
    if type(optimizer) is SGD:
        return OneCycleLR(optimizer, 0.05, total_steps=100)
    return {AdamW: StepLR}[type(optimizer)](optimizer, 2)


def schedule_for_each() -> Workload:
    def schedules(optimizers: list[Optimizer]) -> list[LRScheduler]:
        assert type(optimizers) is list
        return [schedule_of(optimizer) for optimizer in optimizers]

    return Workload(net(), inputs, reversed_loss, in_a_list, schedules)


def schedules_by_name() -> Workload:
    """One schedule follows the loss, which must not fall for it to act."""

    def schedules(optimizers: dict[str, Optimizer]) -> dict[str, LRScheduler]:
        plateau = ReduceLROnPlateau(optimizers["first"], patience=0, threshold=100.0, threshold_mode="abs")
        return {"first": plateau, "the.others": schedule_of(optimizers["others"])}

    return Workload(net(), inputs, reversed_loss, by_name, schedules)


def stepped_by_name() -> Workload:
    def step(model: nn.Module, optimizers: dict[str, Optimizer], share: torch.Tensor) -> torch.Tensor:
        loss = reversed_loss(model, share)
        loss.backward()
        optimizers["first"].step()
        optimizers["others"].step()
        return loss

    return Workload(net(), inputs, None, by_name, step=step)


def rotated(model: nn.Module, by: int) -> list[nn.Parameter]:
    """Return the parameters, beginning with another one for each number."""
    parameters = [*model.parameters()]
    by %= len(parameters)
    return parameters[by:] + parameters[:by]


def group_in_any_order() -> Workload:
    """Each rank of each build has another order, as of a set."""

    def optimizer(model: nn.Module) -> Optimizer:
        parameters = rotated(model, torch.initial_seed() // 1000 + dist.get_rank())
        return AdamW([{"params": parameters, "weight_decay": 0.0}], 0.01)

    return Workload(net(), inputs, reversed_loss, optimizer)


def groups_of_other_members() -> Workload:
    """Each build has other parameters in the first group."""

    def optimizer(model: nn.Module) -> Optimizer:
        first, *others = rotated(model, torch.initial_seed() // 1000)
        return AdamW([{"params": [first]}, {"params": others}], 0.01)

    return Workload(net(), inputs, reversed_loss, optimizer)


class Residual(nn.Module):
    """With its own `forward`, and a normalization that each rank updates by its samples."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.net = nn.Sequential(*net(), *[nn.BatchNorm1d(8)] * norm)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.net(x)


def frozen_teacher(norm: bool = False) -> Workload:
    def loss(models: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            wanted = models["teacher"](x)
        return F.mse_loss(models["student"](x), wanted)

    teacher = Residual(norm).requires_grad_(False)
    return Workload(nn.ModuleDict({"student": net(), "teacher": teacher}), inputs, loss)


def frozen_target_with_buffers() -> Workload:
    return frozen_teacher(norm=True)


class SharpnessAware(SGD):
    """Needs a closure, but its signature does not say so."""

    def step(self, closure: Any = None) -> Any:
        assert closure is not None
        with torch.enable_grad():
            loss = closure()
        super().step()
        return loss


def sharpness_aware() -> Workload:
    return Workload(net(), inputs, reversed_loss, lambda model: SharpnessAware(model.parameters(), 0.1))


def sharpness_aware_step() -> Workload:
    """Its own `step` passes the closure, which torch's state-dict functions do not."""

    def step(model: nn.Module, optimizers: list[Optimizer], share: torch.Tensor) -> torch.Tensor:
        def closure() -> torch.Tensor:
            loss = reversed_loss(model, share)
            loss.backward()
            return loss

        return optimizers[0].step(closure)

    def optimizer(model: nn.Module) -> Optimizer:
        return SharpnessAware(model.parameters(), 0.1)

    return Workload(net(), inputs, None, optimizer, step=step)
