"""The words that ask for a sweep, and those with which a sweep is resumed. A refusal is a ConfigError."""

import os
import re
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dcpbench.config.errors import ConfigError
from dcpbench.config.groups import Rerun
from dcpbench.config.keys import ONE_COMMAND
from dcpbench.config.overrides import quoted
from dcpbench.config.schema import (
    OF_ITS_CELLS,
    SweepConfig,
    defines_cells,
    is_about_the_sweep,
    is_how_run,
    schema_class,
)
from dcpbench.config.text import did_you_mean
from dcpbench.sweep.folder import DIR, Record

MULTIRUN = "--multirun"
_PATHS = ("storage.root", "known_failures", "nccl")
"""Keys of paths that can be passed to a resumed sweep."""


def own_words(arguments: Sequence[str]) -> list[str]:
    """Return the words of a command line that its sweep is resumed with."""
    of_one_command = [item.name for item in fields(SweepConfig) if item.metadata.get(ONE_COMMAND)]
    keys = "|".join((*of_one_command, re.escape(DIR)))
    return [word for word in arguments if word != MULTIRUN and not re.match(rf"[+]*({keys})=", word)]


def with_words(words: Sequence[str], later: Sequence[str]) -> list[str]:
    """Return words and later ones, which replace those with the same keys; options come first."""
    found = {_key(word) or word: word for word in (*words, *later)}
    return sorted(found.values(), key=lambda word: not word.startswith("-"))


def how_run_words(words: Sequence[str]) -> list[str]:
    """Return the words that say how all cells run, as cells have them; a list of values selects cells."""
    how = [word for word in words if is_how_run(_key(word)) and not is_about_the_sweep(_key(word))]
    return [
        f"{override.get_key_element()}={override.get_value_element_as_str()}"
        for override in map(_parsed, how)
        if not override.is_sweep_override()
    ]


def record_of(base: DictConfig) -> tuple[Record, bool]:
    """Return the record of a sweep as its command asks for it, and whether it is resumed; refuse `rerun` and
    `trust` where it is not."""
    folder = Path(str(base.hydra.sweep.dir)).resolve()
    if base.resume is None:
        for key, null in (("rerun", Rerun.none), ("trust", False)):
            if base[key] != null:
                value = str(base[key]).lower()
                raise ConfigError(f"{key}={value}: needs resume=<folder>, which is not set")
        return Record(own_words(sys.argv[1:]), str(Path.cwd()), {}, []), False
    if not str(base.resume):
        raise ConfigError("resume=: names no folder")
    if Path(str(base.resume)).resolve() != folder:
        raise ConfigError(f"resume={base.resume}: {DIR}={folder} is another folder")
    record = Record.read(folder)
    if not base.trust:
        record.refuse_foreign(folder)
    return replace(record, arguments=own_words(sys.argv[1:]), cwd=str(Path.cwd())), True


def words_of_cells(record: Record) -> dict[str, list[str]]:
    """Return the overrides with which a resumed sweep runs each cell, by its name."""
    how = how_run_words(record.arguments)
    return {name: with_words(words, how) for name, words in record.cells.items()}


def command_line(arguments: Sequence[str]) -> list[str]:
    """Return the words that Hydra reads: the folder of a resumed sweep becomes its `hydra.sweep.dir`, and the
    words of its record come first, as they were read in the folder where they were typed.

    Raises:
        ConfigError, hydra.errors.HydraException: `resume` names no sweep, another one than `hydra.sweep.dir`,
            or another user's without `trust=true`; words ask for other cells than the recorded ones; the
            folder in which the sweep was typed was removed.
    """
    asked, own = (_value_of(key, arguments) for key in ("resume", DIR))
    if asked is None:
        return list(arguments)
    folder = Path(str(asked)).resolve()
    if own is not None and Path(str(own)).resolve() != folder:
        raise ConfigError(f"resume={asked}: {DIR}={own} is another folder; leave one of them out")
    record = Record.read(folder)
    if _value_of("trust", arguments) is not True:
        record.refuse_foreign(folder)
    words = [word for word in arguments if not word.startswith(("resume=", DIR))]
    if not _are_typed_again(f"resume={asked}", words, record):
        words = [*map(_from_here, words)]
        try:
            os.chdir(record.cwd)
        except OSError as error:
            raise ConfigError(
                f"resume={asked}: cannot enter {record.cwd}, where it was typed ({error.strerror}); to "
                f"resume it in this folder, add all of its own words: {shlex.join(record.arguments)}"
            ) from None
    absolute = quoted(str(folder))  # the words may be used in another folder
    return [*with_words(record.arguments, words), f"resume={absolute}", f"{DIR}={absolute}"]


def _are_typed_again(asked: str, words: Sequence[str], record: Record) -> bool:
    """Return whether words are those of a sweep about its cells, all of them; refuse any others. The number
    of hosts can be typed alone."""
    own, typed = (
        {_item(word): word for word in given if defines_cells(_key(word))}
        for given in (record.arguments, words)
    )
    hosts = {item for item in own if item[0] in OF_ITS_CELLS}
    wrong = [word for item, word in typed.items() if item not in own]
    is_again = bool(typed.keys() - hosts)
    if not wrong and is_again and own.keys() - hosts - typed.keys():
        wrong = [*typed.values()]
    if wrong:
        names = [item.name for item in fields(schema_class())]
        known = [_key(word).partition(".")[0] in (*names, "experiment", "hydra") for word in wrong]
        near = "" if all(known) else did_you_mean(_key(wrong[known.index(False)]), filter(is_how_run, names))
        raise ConfigError(
            f"{asked}: the cells of that sweep, `{record.command}`, are recorded; leave out "
            f"{shlex.join(wrong)}, or run another sweep{near}"
        )
    for word in words:
        is_list = is_how_run(_key(word)) and _parsed(word).is_sweep_override()
        if is_list and _item(word) not in map(_item, filter(_key, record.arguments)):
            raise ConfigError(f"{word}: applies to all cells of a resumed sweep; pass one value")
    return is_again


def _key(word: str) -> str:
    """Return the key that a word of a command line sets; an empty text for an option and for its value."""
    key, equals, _ = word.lstrip("+~").partition("=")
    return key if not word.startswith("-") and (equals or word.startswith("~")) else ""


def _parsed(word: str) -> Override:
    return OverridesParser.create().parse_override(word)


def _item(word: str) -> tuple[str, str]:
    """Return the key and the value of a word, which are the same however it is spelled."""
    override = _parsed(word)
    return override.get_key_element().lstrip("+"), str(override.value())


def _from_here(word: str) -> str:
    """Return a word such that a relative path in it means the same in another folder."""
    key, _, path = word.partition("=")
    if key == "--config-dir":
        return f"{key}={Path(path).resolve()}"
    value = _value_of(key, [word]) if key in _PATHS else None
    if value is None or "${" in path or Path(str(value)).is_absolute():
        return word
    return f"{key}={quoted(Path(str(value)).resolve())}"


def _value_of(key: str, arguments: Sequence[str]) -> Any:
    """Return the value of the last override of a key, None if it is missing or null."""
    words = [word for word in arguments if word.startswith(f"{key}=")]
    if not words:
        return None
    override = _parsed(words[-1])
    if override.is_sweep_override():
        raise ConfigError(f"{words[-1]}: applies to the complete sweep; pass one value")
    value = override.value()
    with suppress(OmegaConfBaseException):  # an interpolation that only Hydra can resolve
        value = OmegaConf.create([value])[0]
    return value or None
