"""Errors of Hydra and OmegaConf, each reported in one line: the key, the problem, how to fix it."""

import re
from collections.abc import Container, Sequence
from dataclasses import fields, is_dataclass
from enum import EnumType
from types import NoneType, UnionType
from typing import Union, get_args, get_origin, get_type_hints

from hydra.core.override_parser.types import ChoiceSweep, Override, OverrideType
from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import DictConfig, ListConfig
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    KeyValidationError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    ValidationError,
)

from dcpbench.config.errors import ConfigError, value_text
from dcpbench.config.text import choices, did_you_mean, names_shown, visible
from dcpbench.core.axes import AXES

_NOISE = (
    ("^Error merging override ", ""),
    (r"\n?To append to your config use \S+", ""),
    (r"\s*\n\s*(full_key|object_type|reference_type)[:=].*", ""),
    (r"To override a value use 'override (\S+): (\S+)'", r"It is chosen without +: \1=\2"),
    (r"\nConfig search path:(.|\n)*", ""),
)
"""Parts of Hydra's and OmegaConf's messages that are left out or replaced."""


def set_by_dcpbench(choice: str) -> ConfigError:
    """Return the error for another value of a setting of Hydra that dcpbench relies on."""
    return ConfigError(f"{choice}: dcpbench starts cells itself, in hydra.sweep.dir; leave it out")


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


def one_line(error: BaseException, words: Sequence[str] = ()) -> str:
    """Return the message of an error of Hydra, OmegaConf or dcpbench as one line.

    Args:
        words: those of the command line, to quote the one that set an unknown key.
    """
    if isinstance(error, OverrideParseException):
        return malformed(error.override)
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, value = error.missing_cfg_file.rpartition("/")
        return visible(f"{group}={value}: unknown value{choices(value, error.options)}")
    cause = error.__cause__ or error.__context__
    if isinstance(cause, KeyValidationError):
        return visible(f"{cause.full_key}: null is not a key; write a list in brackets, as [null, ddp]")
    for inner in (cause, error):
        if isinstance(inner, MissingMandatoryValue) and inner.full_key:
            return visible(f"{inner.full_key}: has no value")
        if isinstance(inner, ConfigKeyError | ConfigAttributeError) and inner.full_key:
            return visible(f"{inner.full_key}: unknown key{_keys_beside(inner, words)}")
        if isinstance(inner, ValidationError) and inner.full_key and (wrong := _wrong_type(inner)):
            return visible(f"{inner.full_key}={value_text(inner.value)}: {wrong}")
    line = _sentence(str(error))
    if isinstance(cause, OmegaConfBaseException):
        if str(cause) not in str(error):
            line = f"{line.rstrip('.')}: {_sentence(str(cause))}"
        if cause.full_key and cause.full_key not in line:
            line = f"{cause.full_key}: {line}"
    return visible(line)


def malformed(word: str, following: str = "") -> str:
    """Return why Hydra cannot parse a word of the form `key=value`, and how to write it.

    Args:
        following: the next word, if it has no key: a list with spaces comes as several words.
    """
    key, _, value = word.partition("=")
    items = [item.strip() for item in (value + following).split(",") if item.strip()]
    write = f"; write {key}={','.join(items)}" if items else ""
    if not key.strip("+~"):
        why = "has no key in front of the ="
    elif not items:
        why = "has no value"
    elif unpaired := _unpaired(value):
        why = unpaired
    elif value.endswith(","):
        why = f"ends with a comma{write}"
    elif len(items) <= value.count(","):
        why = f"lacks a value next to a comma{write}"
    elif re.fullmatch(r"\w+\(.*\)", value):
        why = "is not a call of one of Hydra's functions; the functions for lists are choice, range, glob"
    else:
        why = f"has characters that need quotes; write '{key}=\"{value}\"'"
    return visible(f"{word}: {why}")


def _unpaired(value: str) -> str:
    """Return which bracket or quote of a value lacks its counterpart; empty if none does."""
    pairs, is_open = {")": "(", "]": "[", "}": "{"}, ""
    for sign in re.sub(r"\\.", "", value):
        if is_open[-1:] in ("'", '"'):
            is_open = is_open[:-1] if sign == is_open[-1] else is_open
        elif sign in "([{'\"":
            is_open += sign
        elif sign in pairs:
            if is_open[-1:] != pairs[sign]:
                return f"has a {sign} without a {pairs[sign]}"
            is_open = is_open[:-1]
    closing = {opening: sign for sign, opening in pairs.items()}
    return f"has a {is_open[-1]} without a closing {closing.get(is_open[-1], is_open[-1])}" if is_open else ""


def _sentence(text: str) -> str:
    for pattern, replacement in _NOISE:
        text = re.sub(pattern, replacement, text)
    return " ".join(text.split())


def _keys_beside(error: OmegaConfBaseException, words: Sequence[str]) -> str:
    """Return the end of a complaint about an unknown key: the key that is close, or all keys there."""
    parent = error.parent_node
    if not isinstance(parent, DictConfig):
        return ""
    names = [str(name) for name in parent if name != "hydra"]
    near = did_you_mean(str(error.key), names)
    if near or is_dataclass(parent._metadata.object_type):
        return near or f"; the keys are {names_shown(names)}"
    full = str(error.full_key)
    typed = (word for word in words if word.startswith((f"{full}=", f"{full}.")))
    return f"; to add it, write +{next(typed, f'{full}=...')}"


def _wrong_type(error: ValidationError) -> str:
    """Return what a value has to be, by the type of its key; empty if the type is not known."""
    parent = error.parent_node
    if not isinstance(parent, DictConfig | ListConfig):
        return ""
    kind, key = parent._metadata.object_type, str(error.key)
    hint = get_type_hints(kind).get(key) if is_dataclass(kind) else parent._metadata.element_type
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    for one in kinds:
        if isinstance(one, EnumType):
            return f"invalid value{choices(value_text(error.value), one.__members__)}"
        if isinstance(one, type) and is_dataclass(one):
            below = [f"{error.full_key}.{item.name}" for item in fields(one)]
            return f"is not one value; its keys are {names_shown(below)}"
    named = [text for one in kinds if (text := _KINDS.get(get_origin(one) or one))]
    return f"must be {' or '.join(named)}" if named else ""


_KINDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    list: "a list, such as [a,b]",
    dict: "a mapping, such as {a:1}",
    NoneType: "null",
}
"""Names of types, for people."""
