"""State dicts as DCP flattens them: dictionaries, and lists that hold dictionaries or tensors."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.stateful import Stateful


def is_gone_into(value: Any) -> bool:
    """Whether DCP flattens it; all else is one value."""
    if isinstance(value, list):
        return any(isinstance(one, torch.Tensor) or is_gone_into(one) for one in value)
    return isinstance(value, dict)


def slots(nested: Any, prefix: str = "") -> Iterator[tuple[Any, Any, str]]:
    """Where the values lie: each one's container, its key or index there, and its flattened key."""
    for name, value in list(nested.items() if isinstance(nested, dict) else enumerate(nested)):
        if is_gone_into(value):
            yield from slots(value, f"{prefix}{name}.")
        else:
            yield nested, name, f"{prefix}{name}"


def state_dicts(state: dict[str, Any]) -> dict[str, Any]:
    """What a state's objects hand out, by their names."""
    return {name: one.state_dict() if isinstance(one, Stateful) else one for name, one in state.items()}


def check_fits(held: Mapping[str, Any], nested: Any) -> None:
    """Refuse, in DCP's words, a checkpoint that cannot fill these state dicts.

    Args:
        held: what it holds, by the flattened keys.

    Raises:
        RuntimeError: it does not hold all of it.
        ValueError: a tensor has another shape.
    """
    for container, name, key in slots(nested):
        if key not in held:
            raise RuntimeError(f"Missing key in checkpoint state_dict: {key}.")
        if isinstance(value := container[name], torch.Tensor) and value.shape != held[key].shape:
            sizes = f"saved {held[key].shape} and current: {value.shape}"
            raise ValueError(f"Size mismatch between {sizes} for {key}")
