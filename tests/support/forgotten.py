"""Workloads and a trainer whose training depends on values that no state dict has."""

import itertools
import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from dcpbench.runs.own_trainer import Setup
from dcpbench.workloads.workload import Workload
from support.ordinary_workloads import WIDTH, inputs, reversed_loss
from support.trainers import Trainer

IMPORTED_AT = time.time_ns()
_calls = 0
ENTRIES = {"calls": 0}
NUMBERS = itertools.count()


class Block(nn.Module):
    """Multiplies by the number of its calls, which it keeps in one of several places."""

    total = 0

    def __init__(self, where: str) -> None:
        super().__init__()
        self.linear, self.where, self.calls = nn.Linear(WIDTH, WIDTH), where, 0
        self.made_at = time.time_ns()

    def number(self) -> int:
        global _calls
        if self.where == "global":
            _calls += 1
            return _calls
        if self.where == "entry":
            ENTRIES["calls"] += 1
            return ENTRIES["calls"]
        if self.where == "class":
            Block.total += 1
            return Block.total
        if self.where == "count":
            return next(NUMBERS)
        self.calls += 1
        return self.calls

    def forward(self, x: torch.Tensor) -> Any:
        return self.linear(x) * (1 + 0.01 * self.number())


def build(where: str) -> Workload:
    return Workload(nn.Sequential(Block(where), nn.Linear(WIDTH, WIDTH)), inputs, reversed_loss)


class LosesItsPosition(Trainer):
    """Restores neither its position in a loader nor the default generators."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.loader = DataLoader(torch.arange(1000.0), 1)
        self.position = iter(self.loader)

    def step(self) -> float:
        with torch.no_grad():
            number = next(self.position) + torch.rand(1)
            next(self.model.parameters()).add_(0.001 * number)
        return super().step()

    def restore(self, own: dict[str, Any]) -> None:
        super().restore({**own, "random": torch.get_rng_state()})
