"""Workloads whose steps depend on more than tensors: values in modules, hooks, closures and optimizers, and a
model that cannot be copied."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import weight_norm

from dcpbench.workloads.workload import Workload
from support.ordinary_optimizers import MasterSgd
from support.ordinary_state import Average
from support.ordinary_workloads import WIDTH, inputs, net, reversed_loss
from support.torch_defects import Weights


class Remembers(nn.Module):
    """Counts its passes in nested values, installs a hook in the first one, and keeps its last output."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.seen, self.is_installed = net(), {"passes": [0]}, False
        self.output: torch.Tensor | None = None
        self.factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_installed:
            self.net[2].register_forward_hook(self._scale)
            self.is_installed = True
        self.output = self.net(x) * (1 + 0.1 * self.seen["passes"][0])
        self.seen["passes"][0] += 1
        return self.output

    def _scale(self, _: nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
        self.factor *= 1.25
        return output * self.factor


def remembers(takes_steps: bool) -> Workload:
    """Return a workload with a loss or with `step`, which keeps an average by a hook of its optimizer, and
    whose loss reads an output that a hook has captured."""
    model, weights = Remembers(), Weights()
    made, captured = dict[str, Average](), list[torch.Tensor]()
    model.net[0].register_forward_hook(lambda _, __, output: captured.append(output))

    def state(wrapped: nn.Module) -> dict[str, Any]:
        made["average"] = Average(wrapped)
        return {"average": made["average"], "weights": weights}

    def optimizer(wrapped: nn.Module) -> torch.optim.Optimizer:
        sgd = MasterSgd(wrapped.parameters())
        sgd.register_step_post_hook(lambda *_: made["average"].update())
        return sgd

    def loss(wrapped: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return reversed_loss(wrapped, x) * weights.next() + captured.pop().square().mean()

    def step(wrapped: nn.Module, optimizers: list[torch.optim.Optimizer], x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            optimizers[0].zero_grad()
            value = loss(wrapped, x)
            value.backward()
            optimizers[0].step()
        return value

    if takes_steps:
        return Workload(model, inputs, optimizer=optimizer, step=step, state=state)
    return Workload(model, inputs, loss, optimizer, state=state)


def not_copied() -> Workload:
    """Has a weight that is computed from others when the model is built."""
    model: Callable[..., nn.Module] = nn.Sequential
    return Workload(model(weight_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh()), inputs, reversed_loss)
