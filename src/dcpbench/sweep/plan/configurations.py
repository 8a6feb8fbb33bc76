"""The configurations of a sweep's jobs as dataclasses, put together of parts that are made once for each
value: of 1,000 cells that cross five axes, some twenty are made whole."""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from dcpbench.config.errors import ConfigError, refuse_unknown
from dcpbench.config.schema import Config
from dcpbench.sweep.plan.composition import Choices, Compositions

_KEYS = frozenset(field.name for field in fields(Config))
_INTERPOLATION = re.compile(r"\$\{[^{}]*\}")


@dataclass
class _Made:
    config: Config
    mentions: dict[str, frozenset[str]]
    """By top-level key, those whose values its interpolations may take."""


class Configurations:
    """The configurations of jobs whose compositions come from here."""

    def __init__(self, compositions: Compositions) -> None:
        self._compositions = compositions
        self._made: dict[Choices, _Made] = {}

    def of(self, overrides: Sequence[str]) -> Config:
        """The configuration of one job. It shares its parts with others: they are not to be changed.

        Raises:
            ConfigError, hydra.errors.HydraException, omegaconf.errors.OmegaConfBaseException: an override
                is wrong.
        """
        with suppress(ConfigError, HydraException, OmegaConfBaseException):
            return self._put_together(overrides)
        return typed(self._compositions.of(overrides))  # which says what is wrong with all of them

    def _put_together(self, overrides: Sequence[str]) -> Config:
        begun, own = self._compositions.begun_with(overrides)
        basis = self._make(begun)
        parts = {}
        for key in {*map(_key_of, own), *basis.mentions}:
            if lines := self._deciding(key, begun, own):
                parts[key] = getattr(self._make((*begun, *lines)).config, key)
        return replace(basis.config, **parts)

    def _deciding(self, key: str, begun: Choices, own: Sequence[str]) -> list[str]:
        """Those of its own overrides that decide a key's value: the key's, and those of keys it mentions."""
        keys: set[str] = set()
        pending = {key}
        while pending:
            one = pending.pop()
            keys.add(one)
            lines = [line for line in own if _key_of(line) == one]
            pending |= self._make((*begun, *lines)).mentions.get(one, frozenset()) - keys
        return [line for line in own if _key_of(line) in keys]

    def _make(self, overrides: Choices) -> _Made:
        if overrides not in self._made:
            composed = self._compositions.of(overrides)
            config = typed(composed)
            raw = OmegaConf.to_container(composed)
            assert isinstance(raw, dict)
            mentions = {str(key): _mentioned(value) for key, value in raw.items() if key in _KEYS}
            found = {key: mentioned for key, mentioned in mentions.items() if mentioned}
            self._made[overrides] = _Made(config, found)
        return self._made[overrides]


def typed(composed: DictConfig) -> Config:
    """The job's part of a composition, which is cut down to it, as the dataclass it was checked against."""
    leave_out_hydra(composed)
    config = OmegaConf.to_object(composed)
    assert isinstance(config, Config)
    refuse_unknown(config)
    return config


def leave_out_hydra(composed: DictConfig) -> None:
    """Cut a composition down to the job's part."""
    with open_dict(composed):
        del composed["hydra"]


@cache
def _key_of(line: str) -> str:
    """The top-level key that an override changes, which is one that sets a value or chooses of a group."""
    return re.split(r"[.=\[]", line, maxsplit=1)[0]


def _mentioned(value: Any) -> frozenset[str]:
    texts = [text for text in _strings(value) if "${" in text]
    if any("${" in _INTERPOLATION.sub("", text) for text in texts):
        return _KEYS  # one within another: its key is known only when it is resolved
    return _KEYS.intersection(*[{word for text in texts for word in re.findall(r"\w+", text)}])


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Iterable):
        for item in [*value, *(value.values() if isinstance(value, dict) else ())]:
            yield from _strings(item)
