"""Write values as Hydra's overrides read them."""

import os
import re
from collections.abc import Mapping
from enum import Enum
from functools import cache
from numbers import Integral, Real
from typing import Any, cast

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import MISSING

from dcpbench.config.errors import ConfigError

_PLAIN = re.compile(r"(?!(?:true|false|null|nan|inf)$)[A-Za-z_][\w.]*", re.ASCII | re.IGNORECASE)
"""Texts that need no quotes."""
_INTERPOLATION = re.compile(r"(\\*)\$\{")
_SPECIAL = re.compile(r"[\\()\[\]{}:=, \t]")
"""Characters that a name in a mapping escapes; it cannot be quoted."""

_PARSER = cache(OverridesParser.create)


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
    if isinstance(value, list | tuple):
        return f"[{','.join(map(quoted, value))}]"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{_name(name)}:{quoted(inside)}' for name, inside in value.items())}}}"
    if not isinstance(value, str | os.PathLike) or not isinstance(text := os.fspath(value), str):
        raise ConfigError(f"{value!r}: must be a number, text, list, mapping, true, false or null")
    if text == MISSING:
        raise ConfigError(f"{text}: stands for a missing value; use another text")
    if _PLAIN.fullmatch(text):
        return str(text)
    escaped = _INTERPOLATION.sub(lambda found: 2 * found[1] + r"\${", text)
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
