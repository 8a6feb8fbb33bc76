"""Errors of the configuration, each reported in one line: the key, the problem, how to fix it."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from dcpbench.config.text import did_you_mean


class ConfigError(Exception):
    """The configuration is wrong: one line for the terminal, exit status 2."""


def too_small(key: str, value: object, least: int) -> str:
    """Return the complaint about a value below the least that its key allows."""
    return f"{key}={value}: must be at least {least}"


def value_text(value: Any) -> str:
    """Return a value as it is written on the command line."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{','.join(map(value_text, value))}]"
    if isinstance(value, Mapping):
        items = [f"{name!s}:{value_text(inner)}" for name, inner in value.items()]
        return f"{{{','.join(items)}}}"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def refuse_unknown(config: Any, path: str = "") -> None:
    """Refuse keys that were added to a configuration (`+foo=1`) though no code reads them.

    Raises:
        ConfigError: it names the first such key.
    """
    known = [field.name for field in fields(config)]
    for name in vars(config).keys() - known:
        raise ConfigError(f"+{path}{name}: unknown key{did_you_mean(name, known)}")
    for name in known:
        if is_dataclass(value := getattr(config, name)):
            refuse_unknown(value, f"{path}{name}.")
