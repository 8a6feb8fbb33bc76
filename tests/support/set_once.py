"""Workloads whose state a control could turn into the saved one, or that refuse any state but their own; and
steps that the twin cannot follow."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from dcpbench.workloads.workload import Workload
from support.ordinary_workloads import inputs, net, reversed_loss

_CHANGES = {
    "flag": (torch.tensor(False), torch.tensor(True)),
    "flags": (torch.zeros(3, dtype=torch.bool), torch.ones(3, dtype=torch.bool)),
    "wraps": (torch.tensor(250, dtype=torch.uint8), torch.tensor(10, dtype=torch.uint8)),
    "counter": (torch.tensor([0]), torch.tensor([16])),
    "absorbs": (torch.tensor(3e38), torch.tensor(3e38)),
    "digested": (torch.zeros(2**23, dtype=torch.bool), torch.ones(2**23, dtype=torch.bool)),
}
"""Buffers as they are in a new model, and as the first step sets them."""


class SetOnce(nn.Module):
    """Sets its buffers and extra state in its first step."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.mode = net(), None
        for name, (new, _) in _CHANGES.items():
            self.register_buffer(name, new.clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mode = False
            for name, (_, later) in _CHANGES.items():
                self.get_buffer(name).copy_(later)
        return self.net(x)

    def get_extra_state(self) -> Any:
        return self.mode

    def set_extra_state(self, state: Any) -> None:
        self.mode = state


class Ratio:
    """Refuses all but 16.0 and 7.0, which is 7/16 of it."""

    def __init__(self) -> None:
        self.value = 16.0

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        if state["value"] not in (16.0, 7.0):
            raise ValueError(f"value is {state['value']}")
        self.value = state["value"]


class Strict(torch.optim.lr_scheduler.LambdaLR):
    """Loads nothing that it did not write."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not isinstance(state["last_epoch"], int):
            raise TypeError(f"last_epoch is {state['last_epoch']}")
        super().load_state_dict(state)


def build() -> Workload:
    ratio = Ratio()

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        ratio.value = 7.0
        return reversed_loss(model, x)

    def scheduler(optimizer: Any) -> Strict:
        return Strict(optimizer, lambda step: 1 / (1 + step))

    return Workload(SetOnce(), inputs, loss, scheduler=scheduler, state={"ratio": ratio})


def perturbed_step(by: str = "data", steps: bool = False) -> Workload:
    """Move the parameters along their gradient before a second backward pass: by hand, or by an optimizer of
    the step's own; with `steps`, the workload's optimizer steps between the two."""

    def step(model: nn.Module, optimizers: Any, x: torch.Tensor) -> Any:
        (optimizer,) = optimizers
        optimizer.zero_grad()
        loss = reversed_loss(model, x)
        loss.backward()
        if steps:
            optimizer.step()
        elif by == "data":
            for parameter in model.parameters():
                parameter.data.add_(parameter.grad, alpha=0.05)
        else:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            torch.optim.SGD(model.parameters(), 0.05).step()
        optimizer.zero_grad()
        reversed_loss(model, x).backward()
        optimizer.step()
        return loss

    return Workload(net(), inputs, step=step)


class Normed(nn.Module):
    """Has statistics of its few raw channels and of sums of them and, unless `drop` is 0, dropout, of which
    compiled code draws other numbers."""

    def __init__(self, drop: float) -> None:
        super().__init__()
        self.raw, self.mix, self.norm = nn.BatchNorm2d(3), nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.net, self.drop = net(), nn.Dropout(drop)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = F.relu(self.norm(self.mix(self.raw(x))))
        return self.net(self.drop(mixed.mean((2, 3))))


def norm(drop: float = 0.1) -> Workload:
    def images(generator: torch.Generator) -> torch.Tensor:
        return torch.rand(8, 3, 8, 8, generator=generator)

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(model(x), x[:, 0, 0, :8])

    return Workload(Normed(drop), images, loss)


def nothing(returns: str) -> Workload:
    values: dict[str, Any] = {"dict": {}, "none": None, "list": [torch.ones(())]}
    return Workload(net(), inputs, lambda model, x: values[returns])
