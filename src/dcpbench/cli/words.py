"""Check the words of a run before Hydra reads them, and report its errors in one line each."""

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from enum import EnumType
from itertools import zip_longest
from pathlib import Path
from types import NoneType, UnionType
from typing import Union, get_args, get_origin, get_type_hints

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
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

from dcpbench.cli import hints
from dcpbench.config.errors import ConfigError, value_text
from dcpbench.config.overrides import refuse_choice
from dcpbench.config.schema import group_names, is_about_the_sweep, is_how_run
from dcpbench.config.text import choices, did_you_mean, names_shown, visible

_OURS = ("hydra/launcher", "hydra/sweeper", "hydra.mode", "hydra.run.dir", "hydra.sweep.subdir")
"""Settings of Hydra that dcpbench relies on, or that nothing reads."""
_NOISE = (
    ("^Error merging override ", ""),
    (r"\n?To append to your config use \S+", ""),
    (r"\s*\n\s*(full_key|object_type|reference_type)[:=].*", ""),
    (r"To override a value use 'override (\S+): (\S+)'", r"It is chosen without +: \1=\2"),
    (r"\nConfig search path:(.|\n)*", ""),
)
"""Parts of Hydra's and OmegaConf's messages that are left out or replaced."""
_QUOTED_KEY = re.compile(r"(?<=[{,])(\s*)(['\"])([\w.*]+)\2(?=\s*:)")
"""A key in a dictionary with quotes, which Hydra does not parse."""


def parse_words(
    words: Sequence[str], command: str = "run", config_dir: Path | None = None, cfg: str | None = None
) -> list[Override]:
    """Parse words; refuse those that Hydra would report in its own terms, or read otherwise than they were
    meant.

    `own` is the user's `--config-dir`, `cfg` the part of a configuration to print, if `--cfg` is given.

    Raises:
        ConfigError: a word is not `key=value`, cannot be parsed, has no value, selects null or a list in
            brackets for a group, or sets a key that another word sets.
    """
    parser, groups = OverridesParser.create(), group_names()
    first: dict[tuple[str, str | None, bool], Override] = {}
    for word, following in zip_longest(words, words[1:], fillvalue=""):
        bare = "" if _has_key(following) else following
        if not _has_key(word):
            raise ConfigError(hints.first_answer(hints.of_word(word, bare, command, config_dir)))
        override, word = None, _QUOTED_KEY.sub(r"\1\3", word)
        with suppress(OverrideParseException):
            (override,) = parser.parse_overrides([word])
        if override is None or "=" in (word[0], word[-1]):
            raise ConfigError(hints.first_answer(hints.of_override(word, bare)))
        if cfg and override.is_sweep_override():
            raise ConfigError(f"{visible(word)}: --cfg prints one cell; pass one value")
        if hint := hints.first_answer(hints.of_key(override.key_or_group, word.partition("=")[2])):
            raise ConfigError(hint)
        if override.key_or_group in _OURS:
            instead = "dcpbench starts cells itself, in hydra.sweep.dir; leave it out"
            raise ConfigError(f"{visible(word)}: {instead}")
        refuse_choice(override, groups)
        key = override.key_or_group, override.package, override.type is OverrideType.DEL
        if key in first:
            raise ConfigError(_twice(str(first[key].input_line), word, override))
        first[key] = override
    return [*first.values()]


def _has_key(word: str) -> bool:
    return "=" in word or word.startswith("~")


def _twice(first: str, word: str, override: Override) -> str:
    """Return the complaint about a second word for the same key."""
    key = override.get_key_element()
    values = ",".join(dict.fromkeys(given_word.partition("=")[2] for given_word in (first, word)))
    name = override.key_or_group
    is_swept = not (is_about_the_sweep(name) or is_how_run(name) or override.is_hydra_override())
    both = f", or write {key}={values} for both" if is_swept and "," in values else ""
    return visible(f"{word}: {key.lstrip('+~')} is given twice (first {first}); leave one out{both}")


def one_line(error: BaseException, words: Sequence[str] = ()) -> str:
    """Return the message of an error of Hydra, OmegaConf or dcpbench as one line.

    Args:
        words: those of the command line, to quote the one that set an unknown key.
    """
    if isinstance(error, OverrideParseException):
        return hints.first_answer(hints.of_override(error.override))
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        path = error.missing_cfg_file
        nested = path.startswith("hydra/")  # the value of another group can be a path
        group, _, value = path.rpartition("/") if nested else path.partition("/")
        return hints.first_answer(hints.of_value(group, value, error.options))
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
    for allowed in kinds:
        if isinstance(allowed, EnumType):
            return f"invalid value{choices(value_text(error.value), allowed.__members__)}"
        if isinstance(allowed, type) and is_dataclass(allowed):
            below = [f"{error.full_key}.{config_field.name}" for config_field in fields(allowed)]
            return f"is not one value; its keys are {names_shown(below)}"
    named = [text for allowed in kinds if (text := _KINDS.get(get_origin(allowed) or allowed))]
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
