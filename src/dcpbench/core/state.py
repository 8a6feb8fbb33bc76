"""The parts of the state of a run, each of which is compared separately."""

from collections.abc import Container, Iterable
from enum import StrEnum
from functools import lru_cache
from typing import TypeVar

Name = tuple[str | int, ...]
"""The name of a value in its part; an FQN is one element: ("net1.weight",), ("param_groups", 0, "lr"),
("state", "net1.weight", "exp_avg")."""

Key = TypeVar("Key", str, Name)
"""A name, or the flattened key of a checkpoint."""


class StatePart(StrEnum):
    """A part of the state of a run. No checkpoint contains its flags."""

    model = "model"
    optimizer = "optimizer"
    scheduler = "scheduler"
    extra = "extra"
    random = "random"
    flags = "flags"


CHECK_OF = {
    StatePart.model: "model_equal",
    StatePart.optimizer: "optim_equal",
    StatePart.scheduler: "extra_equal",
    StatePart.extra: "extra_equal",
    StatePart.random: "random_equal",
    StatePart.flags: "flags_equal",
}
"""The check of a row that compares a part after a load."""

_KEY_PREFIXES = {StatePart.model: "model.", StatePart.optimizer: "optimizer."}
"""The prefixes of the flattened keys of each part in a checkpoint."""


@lru_cache(maxsize=2**14)
def text_of(name: Name | str) -> str:
    """Return a name as messages have it; a flattened key, or an FQN alone, is its own text.

    >>> text_of(("param_groups", 0, "lr"))
    'param_groups.0.lr'
    """
    return name if isinstance(name, str) else ".".join(map(str, name))


def names_with_texts(names: Iterable[Key], texts: Container[str]) -> list[Key]:
    """Return the names that mismatches with these texts are about."""
    return [name for name in names if text_of(name) in texts]


def key_of(part: StatePart, name: Name) -> str:
    """Return the flattened key of a value in a checkpoint.

    >>> key_of(StatePart.optimizer, ("state", "net1.weight", "exp_avg"))
    'optimizer.state.net1.weight.exp_avg'
    """
    return f"{_KEY_PREFIXES.get(part, '')}{text_of(name)}"
