"""Compose the configurations of cells from Hydra's overrides ("words"), composing each word once.

Hydra takes 0.1 s to compose a cell. A word that sets a value, or selects a group value whose file sets only
that group, decides one top-level key of the configuration. The words of each key are therefore composed once,
those of different keys together, and a cell is assembled from its keys. Hydra composes a cell completely if
it has any other word (`+`, `~`, `@package`, `hydra.*`).
"""

import copy
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import fields, make_dataclass
from enum import StrEnum
from functools import cache
from itertools import zip_longest
from typing import Any, NamedTuple, cast

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import OverrideType
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import MISSING, DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from dcpbench.config.errors import ConfigError, refuse_choice, refuse_unknown
from dcpbench.config.schema import Config, config_class, is_about_the_sweep
from dcpbench.core.axes import AXES

Words = tuple[str, ...]
Track = Callable[[Sequence[Any]], Iterable[Any]]
"""Passes on the items of a list, and shows how many of them are done."""

_Kind = StrEnum("_Kind", "choice value wide other")
"""Kind of a word: it selects a group value, or sets a value, of one key alone; it selects a group that can
decide any key, such as an experiment; anything else."""


class _Part(NamedTuple):
    """One key of a configuration: its composition, and its typed value, unless it is `open`: it interpolates
    or lacks a mandatory value."""

    composed: DictConfig
    typed: Any
    open: bool

    @classmethod
    def of(cls, composed: DictConfig, key: str) -> "_Part":
        text = str(OmegaConf.to_container(composed))
        is_open = "${" in text or MISSING in text
        return cls(composed, None if is_open else getattr(OmegaConf.to_object(composed), key), is_open)


class Composer:
    """Compose the configurations of a sweep's cells; `base` is the sweep's own composition.

    Its methods raise ConfigError, hydra.errors.HydraException or omegaconf.errors.OmegaConfBaseException if a
    word is wrong.
    """

    def __init__(self, loader: ConfigLoader, base: DictConfig, track: Track = iter) -> None:
        self._loader, self._base, self._track, self._schema = loader, base, track, config_class()
        self._keys = self._schema.__dataclass_fields__
        self._parts: dict[tuple[Words, str, Words], _Part] = {}
        self._composed: set[tuple[Words, Words]] = set()
        self._parse = cache(OverridesParser.create(config_loader=loader).parse_override)
        self._kind = cache(self._kind_of)
        classes: list[Any] = Plugins.instance().discover(ConfigSource)
        by_scheme = {one.scheme(): one for one in classes}
        found = base.hydra.runtime.config_sources
        self._sources = [by_scheme[one.schema](one.provider, f"{one.schema}://{one.path}") for one in found]
        choices, words = base.hydra.runtime.choices, base.hydra.overrides.task
        self._defaults = {f"{group}=null" for group, value in choices.items() if value is None}
        for name, spec in AXES.items():  # Hydra merges a list in a defaults list, and records no choice
            if spec.group and name not in choices and not any(word.startswith(f"~{name}") for word in words):
                raise ConfigError(f"{name}: has several values in a defaults list; write them into a block")
        self._of_base = self._split_base()

    def prepare(self, cells: Iterable[Sequence[str]]) -> None:
        """Compose the parts of these cells with Hydra."""
        by_wide: defaultdict[Words, list[dict[str, Words]]] = defaultdict(list)
        for wide, by_key in filter(None, map(self._split, cells)):
            by_wide[wide].append(by_key)
        wanted: list[tuple[Words, Words]] = []
        for wide, cells_words in by_wide.items():
            chosen: defaultdict[str, dict[str, None]] = defaultdict(dict)
            for key, (first, *_) in (item for by_key in cells_words for item in by_key.items()):
                if self._kind(first) is _Kind.choice and (wide, key, (first,)) not in self._parts:
                    chosen[key][first] = None
            rows = [(), *(tuple(filter(None, row)) for row in zip_longest(*chosen.values()))]
            new = [(wide, row) for row in rows if (wide, row) not in self._composed]
            if len(new) < len(cells_words):  # else Hydra composes each cell completely
                wanted += new
        for wide, row in self._track(wanted):
            self._compose(wide, row)

    def config(self, words: Sequence[str]) -> Config:
        """Return the configuration of a cell. Cells share parts: do not change it."""
        words = [word for word in words if word not in self._defaults]
        with suppress(HydraException, OmegaConfBaseException):
            if split := self._split(words):
                if split == self._of_base:
                    self._refuse_choices(words)
                    return typed(copy.deepcopy(self._base))
                wide, by_key = split
                parts = {key: self._part(wide, key, by_key.get(key, ())) for key in self._keys}
                values = {key: part.typed for key, part in parts.items() if part and not part.open}
                if len(values) == len(parts):
                    return self._schema(**values)
        return typed(self._by_hydra(words))  # and a wrong word is reported in Hydra's words

    def _by_hydra(self, words: Sequence[str]) -> DictConfig:
        self._refuse_choices(words)
        return self._loader.load_sweep_config(self._base, list(words))

    def _refuse_choices(self, words: Sequence[str]) -> None:
        for override in map(self._parse, words):
            refuse_choice(override, self._base.hydra.runtime.choices)

    def _split_base(self) -> tuple[Words, dict[str, Words]] | None:
        """Return the words of a cell that has the configuration of the sweep; None if no cell can have it."""
        given = cast("list[str]", OmegaConf.to_container(self._base.hydra.overrides.task))
        words = [word for word in given if not self._parse(word).is_sweep_override()]
        is_cells = not any(is_about_the_sweep(self._parse(word).key_or_group) for word in words)
        return self._split(words) if is_cells else None

    def _kind_of(self, word: str) -> _Kind:
        with suppress(HydraException):
            override, groups = self._parse(word), self._base.hydra.runtime.choices
            changes = override.type is OverrideType.CHANGE and override.package is None
            if not changes or override.is_hydra_override() or override.is_sweep_override():
                return _Kind.other
            if (group := override.key_or_group) not in groups:
                return _Kind.value if _key(word) in self._keys else _Kind.other
            if isinstance(value := override.value(), str):
                return _Kind.choice if group in self._keys and self._is_local(group, value) else _Kind.wide
        return _Kind.other

    def _is_local(self, group: str, value: str) -> bool:
        """Return whether a group value sets only its group: its file names no other package, and includes
        other files only in its own place."""
        found = self._read(f"{group}/{value}")
        if found is None or found.header.get("package") not in (None, "_group_"):
            return False
        for item in _defaults(found):
            if item == "_self_":
                continue
            taken, name = next(iter(item.items())) if isinstance(item, dict) else (f"/{group}@_here_", item)
            other = re.fullmatch(r"/(\w+)@_here_", taken)
            if not other or not self._is_local(other[1], str(name)):
                return False
        return True

    def _read(self, path: str) -> ConfigResult | None:
        """Return the first file with this path, as Hydra finds it."""
        return next((source.load_config(path) for source in self._sources if source.is_config(path)), None)

    def _split(self, words: Sequence[str]) -> tuple[Words, dict[str, Words]] | None:
        """Return a cell's wide words, and the others by key, a choice first; None if Hydra has to compose
        it."""
        by_kind = {kind: [word for word in words if self._kind(word) is kind] for kind in _Kind}
        chosen = [_key(word) for word in by_kind[_Kind.choice]]
        if by_kind[_Kind.other] or len(set(chosen)) < len(chosen):
            return None
        by_key: dict[str, Words] = {}
        for word in (*by_kind[_Kind.choice], *by_kind[_Kind.value]):
            by_key[_key(word)] = (*by_key.get(_key(word), ()), word)
        return tuple(by_kind[_Kind.wide]), by_key

    def _part(self, wide: Words, key: str, own: Words) -> _Part | None:
        """Return the part of a key that these words decide, a choice first; None if it was not composed."""
        found = self._parts.get((wide, key, own))
        is_value = own and self._kind(own[-1]) is _Kind.value
        if found or not is_value or not (start := self._part(wide, key, own[:-1])):
            return found
        composed, override = copy.deepcopy(start.composed), self._parse(own[-1])
        OmegaConf.update(composed, override.key_or_group, override.value(), merge=True)
        found = self._parts[wide, key, own] = _Part.of(composed, key)
        return found

    def _compose(self, wide: Words, row: Words) -> None:
        """Compose a row of choices with Hydra, each for another key; the empty row is for all keys."""
        self._composed.add((wide, row))
        composed = self._by_hydra([*wide, *row])
        choices = composed.hydra.runtime.choices.items()
        paths = (f"{group.partition('@')[0]}/{name}" for group, name in choices)
        files = (composed.hydra.job.config_name, *paths) if not row else ()
        if any("${" in str(_defaults(found)) for found in filter(None, map(self._read, files))):
            return  # one choice would decide another
        decided: dict[str, Words] = {_key(word): (word,) for word in row}
        for key, own in (decided or dict.fromkeys(self._keys, ())).items():
            alone = OmegaConf.structured(_schema_of(key))
            alone.merge_with(OmegaConf.masked_copy(composed, [key]))
            OmegaConf.set_struct(alone, True)
            self._parts[wide, key, own] = _Part.of(alone, key)


def typed(composed: DictConfig) -> Config:
    """Remove the key `hydra` from a composition, and return the rest as the schema's dataclass."""
    with open_dict(composed):
        composed.pop("hydra", None)
    config = OmegaConf.to_object(composed)
    assert isinstance(config, Config)
    refuse_unknown(config)
    return config


@cache
def _schema_of(key: str) -> type:
    """Return the schema with one key alone."""
    (own,) = (item for item in fields(config_class()) if item.name == key)
    return make_dataclass(f"{Config.__name__}_{key}", [(key, own.type, own)])


@cache
def _key(word: str) -> str:
    """Return the top-level key that a word decides."""
    return re.split(r"[.=\[]", word, maxsplit=1)[0]


def _defaults(found: ConfigResult) -> list[Any]:
    """Return the defaults list of a file."""
    plain = OmegaConf.to_container(found.config)
    return plain.get("defaults", []) if isinstance(plain, dict) else []
