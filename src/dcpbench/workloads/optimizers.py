"""Optimizers that are no class of torch's with plain values."""

from collections.abc import Iterable
from typing import Any

import torch


def adam_tensor_lr(groups: Iterable[dict[str, Any]], lr: float, **options: Any) -> torch.optim.Adam:
    """Adam whose learning rate is a tensor, as compiled and captured steps want it."""
    return torch.optim.Adam(groups, torch.tensor(lr), **options)
