"""Workloads with a gradient penalty, whose second derivatives `fully_shard` gets wrong, and other defects."""

from typing import Any

import torch
from torch import nn

from dcpbench.workloads.workload import Workload
from support.ordinary_workloads import inputs, net, reversed_loss, wrongly_loaded


def penalty(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    slope = torch.autograd.grad(model(x).sum(), x, create_graph=True)[0]
    return (slope.norm(dim=1) - 1).square().mean()


def penalty_before_score(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return penalty(model, x) + reversed_loss(model, x)


def penalized() -> Workload:
    return Workload(net(), inputs, penalty_before_score)


def penalized_sometimes(wrong: bool = False) -> Workload:
    """Every fourth step has a penalty; if `wrong`, a wrapped model has other gradients two steps later."""

    def batch(generator: torch.Generator) -> torch.Tensor:
        x = inputs(generator)
        x[:, 0] = generator.initial_seed() % 4
        return x

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        number = round(float(x[0, 0]))
        right = penalty_before_score(model, x) if number == 0 else reversed_loss(model, x)
        if not wrong or type(model) is nn.Sequential or number != 2:
            return right
        out = model(x).sum()
        return right + 0.01 * (out - out.detach())

    return Workload(net(), batch, loss)


def penalized_and_wrong_later() -> Workload:
    return penalized_sometimes(wrong=True)


def wrong_load_before_a_penalty() -> Workload:
    """Has a load that changes a parameter; only later steps have a penalty, after the score."""

    class Loaded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.is_loaded = net(), False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.net(x)
            return out

    def wrong(module: Any) -> None:
        module.is_loaded = True
        module.net[0].bias += 1

    def loss(model: Any, x: torch.Tensor) -> torch.Tensor:
        score = reversed_loss(model, x)
        return score + penalty(model, x) if model.is_loaded else score

    return Workload(wrongly_loaded(Loaded(), wrong), inputs, loss)
