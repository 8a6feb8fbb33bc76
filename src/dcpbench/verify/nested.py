"""Nested dictionaries and lists, as DCP flattens them into the keys of a checkpoint: mappings, and lists with
a tensor or a mapping at any depth. Any other value has one key."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch


def is_gone_into(value: Any) -> bool:
    """Return whether DCP flattens a value; any other value is stored under one key."""
    if isinstance(value, list):
        return any(isinstance(item, torch.Tensor) or is_gone_into(item) for item in value)
    return isinstance(value, Mapping)


def items(nested: Any, prefix: str = "") -> Iterator[tuple[Any, Any, str]]:
    """Yield the key or index, the value and the flattened key of each item of a container. A text keeps its
    quotes if there is a number with the same digits: DCP gives both the same key."""
    if isinstance(nested, list):
        yield from ((number, value, f"{prefix}{number}") for number, value in enumerate(nested))
        return
    numbers = {str(name) for name in nested if not isinstance(name, str)}
    for name, value in [*nested.items()]:
        yield name, value, f"{prefix}{name!r}" if name in numbers else f"{prefix}{name}"


def slots(nested: Any, prefix: str = "") -> Iterator[tuple[Any, Any, str]]:
    """Yield the place of each value: its container, its key or index there, and its flattened key."""
    for name, value, key in items(nested, prefix):
        if is_gone_into(value):
            yield from slots(value, f"{key}.")
        else:
            yield nested, name, key


def mapped(nested: Any, change: Callable[[Any, str], Any], prefix: str = "") -> Any:
    """Return a copy of a container, in which every value is `change(value, flattened key)`."""
    copied = {
        name: mapped(value, change, f"{key}.") if is_gone_into(value) else change(value, key)
        for name, value, key in items(nested, prefix)
    }
    return [*copied.values()] if isinstance(nested, list) else copied
