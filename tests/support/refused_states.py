"""Workloads whose state torch's functions return and then refuse, and each with another fault beside it."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils import parametrizations
from torch.optim import SGD, AdamW, Optimizer

from dcpbench.workloads.workload import Workload
from support.ordinary_workloads import WIDTH, inputs, net, reversed_loss


class Tied(nn.Module):
    """Has a layer under two names, and can refuse a state dict because of another name."""

    def __init__(self, other: str = "") -> None:
        super().__init__()
        self.encoder = nn.Linear(WIDTH, WIDTH)
        self.decoder, self.head, self.other = self.encoder, nn.Linear(WIDTH, WIDTH), other

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.gelu(self.decoder(F.gelu(self.encoder(x)))))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        if self.other:
            args[2].append(f"{prefix}{self.other}")
        super()._load_from_state_dict(state_dict, prefix, *args)


def tied_module() -> Workload:
    return Workload(Tied(), inputs, reversed_loss)


def tied_norm() -> Workload:
    layer = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
    return Workload(nn.Sequential(layer, nn.GELU(), layer), inputs, reversed_loss)


def tied_and_other_key() -> Workload:
    return Workload(Tied("forgotten"), inputs, reversed_loss)


def by_kind(model: nn.Module) -> list[Optimizer]:
    first, *others = model.parameters()
    return [SGD([first], 0.05), AdamW(others, 0.01)]


def stateless_beside_adamw() -> Workload:
    return Workload(net(), inputs, reversed_loss, by_kind)


def momentum_in_one_group() -> Workload:
    def optimizer(model: nn.Module) -> Optimizer:
        first, *others = model.parameters()
        return SGD([{"params": [first]}, {"params": others, "momentum": 0.9}], 0.05)

    return Workload(net(), inputs, reversed_loss, optimizer)


class Forgetful(AdamW):
    """Saves no state of its first parameter."""

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        state["state"].pop(0, None)
        return state


def forgets_a_parameter() -> Workload:
    return Workload(net(), inputs, reversed_loss, lambda model: Forgetful(model.parameters(), 0.01))
