"""Nested dictionaries and lists, as DCP flattens them into the keys of a checkpoint: mappings, and lists with
a tensor or a mapping at any depth. Any other value has one key."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from dcpbench.core.state import Name, text_of


def is_gone_into(value: Any) -> bool:
    """Return whether DCP flattens a value; any other value is stored under one key."""
    if isinstance(value, list):
        return any(isinstance(item, torch.Tensor) or is_gone_into(item) for item in value)
    return isinstance(value, Mapping)


def items(nested: Any, prefix: Name = ()) -> Iterator[tuple[Any, Any, Name]]:
    """Yield the key or index, the value and the name of each item of a container. A text keeps its
    quotes if there is a number with the same digits: DCP gives both the same key."""
    if isinstance(nested, list):
        yield from ((number, value, (*prefix, number)) for number, value in enumerate(nested))
        return
    numbers = {str(name) for name in nested if not isinstance(name, str)}
    for name, value in [*nested.items()]:
        last = repr(name) if name in numbers else name
        yield name, value, (*prefix, last if isinstance(last, str | int) else str(last))


def slots(nested: Any, prefix: Name = ()) -> Iterator[tuple[Any, Any, Name]]:
    """Yield the place of each value: its container, its key or index there, and its name."""
    for key, value, name in items(nested, prefix):
        if is_gone_into(value):
            yield from slots(value, name)
        else:
            yield nested, key, name


def flattened(nested: Any) -> dict[str, Any]:
    """Return the values in nested containers by their flattened keys."""
    return {text_of(name): container[key] for container, key, name in slots(nested)}


def mapped(nested: Any, change: Callable[[Any, Name], Any], prefix: Name = ()) -> Any:
    """Return a copy of a container, in which every value is `change(value, name)`."""
    copied = {
        key: mapped(value, change, name) if is_gone_into(value) else change(value, name)
        for key, value, name in items(nested, prefix)
    }
    return [*copied.values()] if isinstance(nested, list) else copied
