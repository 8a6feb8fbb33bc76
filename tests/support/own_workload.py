"""A workload as a user would write one: a small language model with dropout, token ids, its own loss."""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.optim.lr_scheduler import LambdaLR

from dcpbench.workloads.workload import Workload

TOKENS, WIDTH, LENGTH = 50, 16, 8


class LanguageModel(nn.Module):
    """One transformer layer between an embedding and its head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.1, batch_first=True)
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Map token ids of shape (batch, length) to logits of shape (batch, length, tokens)."""
        return self.head(self.layer(self.embed(ids)))


def falling(epoch: int, gamma: float = 0.75) -> float:
    return gamma**epoch


class Warmup:
    """A schedule that is an object, whose attributes `LambdaLR` saves."""

    def __init__(self) -> None:
        self.steps = 3

    def __call__(self, epoch: int) -> float:
        return min(1.0, (epoch + 1) / self.steps)


SCHEDULES = {"function": lambda: falling, "partial": lambda: partial(falling, gamma=0.25), "object": Warmup}
"""A function that makes one: an object belongs to one run."""


def build(schedule: str | None = None, **training: Any) -> Workload:
    """Build it; with a `schedule` its scheduler is a `LambdaLR` of that."""

    def batch(generator: torch.Generator) -> dict[str, torch.Tensor]:
        ids = torch.randint(TOKENS, (24, LENGTH + 1), generator=generator)
        return {"ids": ids[:, :-1], "labels": ids[:, 1:]}

    def loss(model: nn.Module, share: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(model(share["ids"]).flatten(0, 1), share["labels"].flatten())

    scheduler = partial(LambdaLR, lr_lambda=SCHEDULES[schedule]()) if schedule else None
    return Workload(LanguageModel(), batch, loss, scheduler=scheduler, **training)
