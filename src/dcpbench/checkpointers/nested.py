"""State dicts as DCP flattens them: dictionaries, and lists that hold dictionaries or tensors."""

from collections.abc import Iterator
from typing import Any

import torch


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
