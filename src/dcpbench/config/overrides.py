"""Write keys and values from Python as overrides, so that Hydra reads the same values."""

import os
import re
from collections.abc import Container, Iterator, Mapping
from enum import Enum
from functools import cache
from numbers import Integral, Real
from typing import Any, cast

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, OverrideType, Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import MISSING, ListConfig

from dcpbench.config.errors import ConfigError, value_text
from dcpbench.config.schema import can_be_null, is_list
from dcpbench.core.axes import AXES

_PLAIN = re.compile(r"(?!(?:true|false|null|nan|inf)$)[A-Za-z_][\w.]*", re.ASCII | re.IGNORECASE)
"""Texts that need no quotes."""
_KEY = re.compile(r"[A-Za-z_$][\w$-]*|0|[1-9]\d*", re.ASCII)
"""A name that can follow a dot in a key."""
_INTERPOLATION = re.compile(r"(\\*)\$\{")
_SPECIAL = re.compile(r"[\\()\[\]{}:=, \t]")
"""Characters that a name in a mapping escapes; it cannot be quoted."""

_PARSER = cache(OverridesParser.create)


def overrides(keys: Mapping[str, Any]) -> list[str]:
    """Return the overrides that set these keys; a mapping has the keys inside its key.

    >>> overrides({"timeouts": {"cell_s": 60}, "model.options": {"groups": [{"lr": 1}]}})
    ['timeouts.cell_s=60', '++model.options.groups=[{lr:1}]']

    Raises:
        ConfigError: overrides cannot express a value.
    """
    return [word for key, value in keys.items() for word in _inside(key, value)]


def override(key: str, *values: Any) -> str:
    """Return the override that sets a key to a value, or sweeps it over several.

    Raises:
        ConfigError: overrides cannot express a value.
    """
    try:
        return f"{'++' if _is_of_options(key) else ''}{key}={','.join(map(quoted, values))}"
    except ConfigError as error:
        raise ConfigError(f"{key}={error}") from None


def of_block(name: str, block: Mapping[Any, Any]) -> list[str]:
    """Return the overrides of a block of an experiment. A text is written as on the command line, a list is a
    list of values; the value of a key such as `optimizer.betas` is a list itself, and several are in a list.

    Raises:
        ConfigError: a list has no brackets, so that YAML has read its values as keys.
    """
    words, last = [], ""
    for key, value in block.items():
        listed = [*value] if isinstance(value, ListConfig) else []
        if value is None and not can_be_null(key):
            write = f"; write a list in brackets: {last}: [{value_text(block[last])}, {value_text(key)}]"
            raise ConfigError(f"block {name}: {value_text(key)} has no value{write if last else ''}")
        if is_list(key) and not any(element is None or isinstance(element, ListConfig) for element in listed):
            listed = []
        text = ",".join(map(quoted, listed)) or (value if isinstance(value, str) else quoted(value))
        words.append(f"{key}={text}")
        last = key
    return words


def refuse_choice(override: Override, groups: Container[str]) -> None:
    """Refuse null as the value of a group, for which Hydra raises an error without the group's name, and of
    an axis a list in brackets; Hydra would use its last value, with settings of all.

    Raises:
        ConfigError: the override has it, alone or in a list.
    """
    group, value = override.key_or_group, override.value()
    values = value.list if isinstance(value, ChoiceSweep) else [value]
    if group in groups and override.type is not OverrideType.DEL and None in values:
        raise ConfigError(f"{group}=null: cannot be null; leave it out")
    if group in AXES and isinstance(value, list):
        raise ConfigError(f"{override.input_line}: use {group}={','.join(map(value_text, value)) or 'a,b'}")


def _inside(key: str, value: Any) -> Iterator[str]:
    if isinstance(value, Mapping) and not (_is_of_options(key) and _is_a_value(value)):
        for name, inside in value.items():
            yield from _inside(f"{key}.{name}", inside)
    elif value is not None or key not in AXES or not AXES[key].group:  # a group has no value null
        yield override(key, value)


def _is_of_options(key: str) -> bool:
    """Return whether a key is `options` or inside it, where all names are the user's."""
    return ".options." in f"{key}."


def _is_a_value(value: Mapping[Any, Any]) -> bool:
    """Return whether a mapping is written as a value: its names cannot be parts of a key, or it is empty."""
    return not value or not all(isinstance(name, str) and _KEY.fullmatch(name) for name in value)


def quoted(value: Any) -> str:
    r"""Return a value as it is written after `key=`, so that the configuration gets this value.

    A tuple becomes a list, a path its text, and a member of an Enum its name.

    >>> quoted({"groups": [{"lr": 1e-3}, None, "1", "it's ${x}"]})
    "{groups:[{lr:0.001},null,'1','it\\'s \\${x}']}"

    Raises:
        ConfigError: overrides cannot express it.
    """
    if isinstance(value, Enum) and not isinstance(value, str | int):
        value = value.name
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Integral):
        return str(int(value))
    if isinstance(value, Real):
        return repr(float(value))
    if isinstance(value, list | tuple | ListConfig):
        return f"[{','.join(map(quoted, value))}]"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{_name(name)}:{quoted(inside)}' for name, inside in value.items())}}}"
    if not isinstance(value, str | os.PathLike) or not isinstance(text := os.fspath(value), str):
        raise ConfigError(f"{value!r}: must be a number, text, list, mapping, true, false or null")
    if text == MISSING:
        raise ConfigError(f"{text}: stands for a missing value; use another text")
    if _PLAIN.fullmatch(text):
        return str(text)
    escaped = _INTERPOLATION.sub(lambda match: 2 * match[1] + r"\${", text)
    return QuotedString(escaped, Quote.single).with_quotes()


def _name(name: Any) -> str:
    """Return a name in a mapping as it is written.

    Raises:
        ConfigError: Hydra would read another name, such as the number 1 for the text "1".
    """
    text = _SPECIAL.sub(r"\\\g<0>", name) if isinstance(name, str) else quoted(name)
    try:
        read: list[Any] = list(cast("dict[Any, Any]", _PARSER().parse_override(f"key={{{text}:0}}").value()))
    except HydraException:
        read = []
    if name is None or read != [name] or isinstance(read[0], str) is not isinstance(name, str):
        raise ConfigError(
            f"{name!r}: cannot be a name in a mapping; begin with a-z, and use a-z, 0-9, . or _"
        )
    return text
