"""How an optimizer's parameters are put into groups: one function for each way."""

from typing import Any

from torch import nn


def one(model: nn.Module) -> list[dict[str, Any]]:
    """All parameters in one group."""
    return [{"params": list(model.parameters())}]


def biases_apart(model: nn.Module) -> list[dict[str, Any]]:
    """Weights first, then biases in a group of their own, at half the learning rate of torch's default
    and without weight decay. Told by their names: FSDP1's parts of a weight have one dimension."""
    named = list(model.named_parameters())
    weights = [value for name, value in named if not name.endswith("bias")]
    biases = [value for name, value in named if name.endswith("bias")]
    return [{"params": weights}, {"params": biases, "lr": 0.0005, "weight_decay": 0.0}]
