"""Compose the configurations of cells from Hydra's overrides ("words").

Hydra takes 0.1 s to compose a cell. Most words decide one top-level key of the configuration: they set a
value, or select a group value whose files set only that group. The part of such a key is made by merging
those files into the key's schema. Hydra composes a cell completely if a word (`+`, `~`, `@package`,
`hydra.*`) or a file (`${`, another package) reaches beyond its key.
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields, make_dataclass
from functools import cache
from typing import Any, NamedTuple

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import OverrideType
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.types import RunMode
from omegaconf import MISSING, DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from dcpbench.config.errors import ConfigError, refuse_unknown
from dcpbench.config.overrides import refuse_choice
from dcpbench.config.schema import Config, SweepConfig, config_class
from dcpbench.core.axes import AXES

Words = tuple[str, ...]
_SCHEMA = "schema"
"""The name of the schema in a defaults list: it sets every key."""


class _ReachesBeyondError(Exception):
    """A word or a file decides more than one key."""


class _Word(NamedTuple):
    """A word, the key that it decides, and the group value if it selects one. The key is empty if that group
    value can decide any key, as an experiment can."""

    text: str
    key: str
    choice: str = ""


class _Start(NamedTuple):
    """A composition, of which a cell has the keys that its words do not decide; in plain values, in which
    interpolations are not resolved; and typed."""

    composed: DictConfig
    plain: Any
    typed: Any


class Composer:
    """Compose the configurations of a sweep's cells; `base` is the sweep's own composition.

    `config` raises ConfigError, hydra.errors.HydraException or omegaconf.errors.OmegaConfBaseException if a
    word is wrong.
    """

    def __init__(self, loader: ConfigLoader, base: DictConfig) -> None:
        self._loader, self._base, self._schema = loader, base, config_class()
        self._parse = cache(OverridesParser.create(config_loader=loader).parse_override)
        self._word, self._start = cache(self._word_of), cache(self._start_of)
        self._globals = cache(self._set_by)
        self._parts: dict[tuple[Words, str, tuple[_Word, ...]], Any] = {}
        classes: list[Any] = Plugins.instance().discover(ConfigSource)
        by_scheme = {source.scheme(): source for source in classes}
        searched = base.hydra.runtime.config_sources
        self._sources = [
            by_scheme[searched_source.schema](
                searched_source.provider, f"{searched_source.schema}://{searched_source.path}"
            )
            for searched_source in searched
        ]
        self._choices, words = base.hydra.runtime.choices, base.hydra.overrides.task
        self._null_choices = {f"{group}=null" for group, choice in self._choices.items() if choice is None}
        for name, spec in AXES.items():  # Hydra merges a list in a defaults list, and records no choice
            is_left_out = any(word.startswith(f"~{name}") for word in words)
            if spec.group and name not in self._choices and not is_left_out:
                raise ConfigError(f"{name}: has several values in a defaults list; write them into a block")
        overrides = [self._parse(word) for word in words]
        self._words_of_base = {
            str(override.input_line)
            for override in overrides
            if not override.is_sweep_override()
            and override.key_or_group not in SweepConfig.__dataclass_fields__
        }

    def config(self, words: Sequence[str]) -> Config:
        """Return the configuration of a cell. Cells share parts: do not change it."""
        words = [word for word in words if word not in self._null_choices]
        with suppress(_ReachesBeyondError, HydraException, OmegaConfBaseException):
            return self._by_files(words)
        return typed(self._composed(words))  # and a wrong word is reported in Hydra's words

    def _composed(self, words: Sequence[str]) -> DictConfig:
        """Return the composition of Hydra."""
        for override in map(self._parse, words):
            refuse_choice(override, self._choices)
        return self._loader.load_sweep_config(self._base, [*words])

    def _start_of(self, wide: Words | None) -> _Start:
        """Return the composition with these wide words; None: that of the sweep."""
        composed = self._base if wide is None else self._composed(wide)
        start = OmegaConf.masked_copy(composed, [*self._schema.__dataclass_fields__])
        return _Start(start, OmegaConf.to_container(start), OmegaConf.to_object(start))

    def _by_files(self, words: Sequence[str]) -> Config:
        """Return the configuration of a cell, a part for each key."""
        read = sorted(map(self._word, words), key=lambda word: not word.choice)
        wide = tuple(word.text for word in read if not word.key)
        is_as_base = {*wide} <= self._words_of_base <= {*words}
        start = self._start(None if is_as_base else wide)
        known = self._words_of_base if is_as_base else set[str]()
        by_key: dict[str, tuple[_Word, ...]] = {}
        for word in read:
            by_key[word.key] = (*by_key.get(word.key, ()), word)
        parts = {}
        for key in self._schema.__dataclass_fields__:
            at = wide, key, by_key.get(key, ())
            if at not in self._parts:
                is_start = known.issuperset(word.text for word in at[2])
                self._parts[at] = self._of_start(start, key) if is_start else self._part(start, *at)
            parts[key] = self._parts[at]
        return self._schema(**parts)

    def _part(self, start: _Start, wide: Words, key: str, words: Sequence[_Word]) -> Any:
        """Return the value of a key that these words decide, a choice first. Without a choice they change its
        value in `start`, a composition with the wide words.

        Raises:
            _ReachesBeyondError: it depends on other keys, too.
        """
        schema = OmegaConf.structured(_schema_of(key))
        choices = [word.choice for word in words if word.choice]
        if len(choices) > 1 or (choices and key in self._globals(wide)):
            raise _ReachesBeyondError
        for content in self._files(key, choices[0]) if choices else ():
            schema.merge_with({key: content})
        if not choices:
            schema.merge_with(OmegaConf.masked_copy(start.composed, [key]))
        OmegaConf.set_struct(schema, True)
        for override in (self._parse(word.text) for word in words if not word.choice):
            OmegaConf.update(schema, override.key_or_group, override.value(), merge=True)
        _refuse_open(OmegaConf.to_container(schema))
        return getattr(OmegaConf.to_object(schema), key)

    def _of_start(self, start: _Start, key: str) -> Any:
        """Return the value of a key as it is in `start`; raise as `_part`."""
        _refuse_open(start.plain[key])
        return start.typed[key]

    def _word_of(self, text: str) -> _Word:
        """Return which key a word decides.

        Raises:
            _ReachesBeyondError: it does more than select a group value, or set a value of one key.
        """
        override = self._parse(text)
        name, value = override.key_or_group, override.value()
        changes = override.type is OverrideType.CHANGE and override.package is None
        if not changes or override.is_hydra_override() or override.is_sweep_override():
            raise _ReachesBeyondError
        if name in self._choices:
            if not isinstance(value, str):
                raise _ReachesBeyondError
            return _Word(text, name if self._is_local(name, value) else "", value)
        key = re.split(r"[.\[]", name, maxsplit=1)[0]
        if key not in self._schema.__dataclass_fields__:
            raise _ReachesBeyondError
        return _Word(text, key)

    def _is_local(self, group: str, value: str) -> bool:
        """Return whether the files of a group value set only its group, a key of the configuration."""
        with suppress(_ReachesBeyondError):
            return group in self._schema.__dataclass_fields__ and bool(self._files(group, value))
        return False

    def _files(self, group: str, value: str) -> list[Any]:
        """Return the contents of the files of a group value, in the order in which Hydra merges them.

        Raises:
            _ReachesBeyondError: there is no such file; or one names another package, or includes others in
                another place than its own.
        """
        file = self._read(f"{group}/{value}")
        if file is None or file.header.get("package") not in (None, "_group_"):
            raise _ReachesBeyondError
        defaults, content = _split(file)
        contents = []
        for default in defaults if "_self_" in defaults else [*defaults, "_self_"]:
            place, name = (
                next(iter(default.items())) if isinstance(default, dict) else (f"/{group}@_here_", default)
            )
            of_group = re.fullmatch(r"/(\w+)@_here_", place)
            if not of_group:
                raise _ReachesBeyondError
            contents += [content] if name == "_self_" else self._files(of_group[1], str(name))
        return contents

    def _read(self, path: str) -> ConfigResult | None:
        """Return the first file with this path, as Hydra finds it."""
        return next((source.load_config(path) for source in self._sources if source.is_config(path)), None)

    def _set_by(self, wide: Words) -> set[str]:
        """Return the keys that files set which are not values of those keys: the main one, and experiments.

        Raises:
            _ReachesBeyondError: in a defaults list one choice decides another.
        """
        hydras = [*self._base.hydra.overrides.hydra, *wide]
        listed = self._loader.compute_defaults_list(
            self._base.hydra.job.config_name, hydras, RunMode.MULTIRUN
        )
        keys = set[str]()
        for default in listed.defaults:
            path = str(default.config_path)
            file = None if path == _SCHEMA or path.startswith("hydra/") else self._read(path)
            defaults, content = _split(file) if file else ([], {})
            if "${" in str(defaults):
                raise _ReachesBeyondError
            if not default.package:
                keys |= {*content}
            elif (key := default.package.partition(".")[0]) != path.partition("/")[0]:
                keys.add(key)
        return keys


def typed(composed: DictConfig) -> Config:
    """Return the keys of a cell in a composition as their dataclass."""
    with open_dict(composed):
        composed.pop("hydra", None)
    config: Any = OmegaConf.to_object(composed)
    refuse_unknown(config)
    kind = config_class()
    return kind(**{name: getattr(config, name) for name in kind.__dataclass_fields__})


def _refuse_open(value: Any) -> None:
    """Raise if a value interpolates other keys, or lacks a mandatory value."""
    text = str(value)
    if "${" in text or MISSING in text:
        raise _ReachesBeyondError


@cache
def _schema_of(key: str) -> type:
    """Return the schema with one key alone."""
    (field,) = (config_field for config_field in fields(config_class()) if config_field.name == key)
    return make_dataclass(f"{Config.__name__}_{key}", [(key, field.type, field)])


def _split(file: ConfigResult) -> tuple[list[Any], Any]:
    """Return the defaults list of a file, and the rest of it."""
    content = OmegaConf.to_container(file.config)
    defaults = content.pop("defaults", []) if isinstance(content, dict) else []
    return defaults, content
