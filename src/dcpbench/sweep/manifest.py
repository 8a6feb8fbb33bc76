"""A sweep's folder: claimed before anything starts, never shared with another sweep or driver, and described.

What a sweep was asked for is written down before it begins, and taken again when it is resumed:
`resume=<folder>` alone stands for the whole command line, typed where it was typed.
"""

import json
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser

from dcpbench.config.errors import ConfigError
from dcpbench.config.schema import OF_ITS_CELLS, OF_THE_SWEEP, PART
from dcpbench.records import files, lock
from dcpbench.records.row_reader import parse
from dcpbench.records.store import RESULTS_JSONL, SWEEP_JSON, write_json
from dcpbench.sweep.part import Part
from dcpbench.sweep.signature import is_own, sign

_DIR = "hydra.sweep.dir"
_FOLDERS = r"hydra\.(sweep|run)\.dir"
_FIELDS = ("arguments", "cwd", "cells", "storage")


@dataclass(frozen=True)
class Record:
    """The words of the command line without those that are about the sweep itself, where they were
    typed, the names of the cells, and the folders below `storage.root` that are this sweep's."""

    arguments: list[str]
    cwd: str
    cells: list[str]
    storage: list[str]
    overrides: dict[str, list[str]] | None = None
    """Of each cell, by its name; None in records that earlier versions wrote."""
    signature: str | None = None
    """Of the user who made the sweep, see `sweep.signature`."""

    def write(self, folder: Path) -> None:
        """Write it, signed, whole or not at all."""
        write_json(folder / SWEEP_JSON, asdict(replace(self, signature=sign(self._content))))

    def refuse_foreign(self, folder: Path, key: str = "resume=") -> None:
        """Refuse to go on with a sweep that somebody else has made, or this user with another home: what it
        names, in the folder that it names, would run. `key` is what asked for it.

        Raises:
            ConfigError: it says what would run.
        """
        if not is_own(self._content, self.signature):
            asked = shlex.join(["python", "-m", "dcpbench", *self.arguments])
            raise ConfigError(
                f"{key}{folder}: {SWEEP_JSON} is not signed with this user's key: somebody else may have "
                f"made it, and going on runs what it names: `{asked}` in {self.cwd}; "
                "if you want that, add trust=true"
            )

    @property
    def _content(self) -> bytes:
        """What is signed."""
        overrides = [] if self.overrides is None else [self.overrides]
        return json.dumps([*(getattr(self, name) for name in _FIELDS), *overrides]).encode()


def read(folder: Path, key: str = "resume=") -> Record:
    """The record in a sweep's folder, which `key` of the configuration asks for.

    Raises:
        ConfigError: there is no such folder, or no sweep in it.
    """
    where = f"{key}{folder}"
    if not folder.is_dir():
        raise ConfigError(f"{where}: there is no such folder")
    try:
        known, _ = parse(files.read(folder / SWEEP_JSON))
        added = {name: known.get(name) for name in ("overrides", "signature")}
        record = Record(**{name: known[name] for name in _FIELDS}, **added)
        by_cell = {} if record.overrides is None else record.overrides
        lists = (record.arguments, record.cells, record.storage, *by_cell.values())
        if not all(isinstance(item, list) and all(isinstance(word, str) for word in item) for item in lists):
            raise ValueError("no lists of texts")
        if "\0" in "".join([record.cwd, *chain(*lists)]):  # TypeError where one is no text
            raise ValueError("NUL bytes")
    except FileNotFoundError:
        raise ConfigError(f"{where}: holds no sweep that could be resumed (no {SWEEP_JSON})") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{where}: {SWEEP_JSON} is not what a sweep writes ({error!r})") from None
    return record


def own_words(arguments: Sequence[str]) -> list[str]:
    """The words of a command line that say what the cells are."""
    keys, cells = (
        "|".join((*OF_THE_SWEEP, _FOLDERS)),
        "|".join(map(re.escape, OF_ITS_CELLS)),
    )
    return [word for word in arguments if not re.match(rf"[+]*(?!({cells})=)({keys})(\.\w+)*=", word)]


def command_line(arguments: Sequence[str]) -> list[str]:
    """What Hydra is given: the command line, with the folder of a sweep that is resumed as its own, and
    with what was asked for there if nothing else is said here. A part of a sweep has a folder below that of
    the whole one, whose words hold for it; one that has not begun yet begins.

    Raises:
        ConfigError, hydra.errors.HydraException: `resume` names no sweep, another one than `hydra.sweep.dir`,
            or one of somebody else's without `trust=true`; the folder in which it was asked for is gone.
    """
    asked, own = _value_of("resume", arguments), _value_of(_DIR, arguments)
    part = _value_of(PART, arguments)
    if asked is None and part is None:
        return list(arguments)
    if asked is None and own is None:
        raise ConfigError(
            f"part={part}: name the folder of the whole sweep, {_DIR}=outputs/<sweep>, for all parts"
        )
    folder = Path(str(asked or own)).resolve()
    if own is not None and Path(str(own)).resolve() != folder:
        raise ConfigError(f"resume={asked}: {_DIR}={own} is another folder; leave one of them out")
    place = folder if part is None else Part.parse(str(part)).folder(folder)
    begun = asked is not None and (part is None or (place / SWEEP_JSON).exists())
    words = own_words(arguments)
    replaced = ["resume=", _DIR]
    if asked is not None and not begun:  # of a part that begins no row could run again
        replaced += ["rerun=", "trust="]
    here = [word for word in arguments if word not in words and not word.startswith(tuple(replaced))]
    absolute = quoted(str(place))  # since the words may be taken from another place
    here += [*([f"resume={absolute}"] if begun else []), f"{_DIR}={absolute}"]
    said = [word for word in words if word.startswith(tuple(f"{key}=" for key in (PART, *OF_ITS_CELLS)))]
    if asked is not None and not {*words} - {"-m", "--multirun", *said}:
        record = read(folder)
        if _value_of("trust", arguments) is not True:
            record.refuse_foreign(folder)
        words = [*record.arguments, *said]
        try:
            os.chdir(record.cwd)
        except OSError as error:
            raise ConfigError(
                f"resume={asked}: it was asked for in {record.cwd}, which cannot be entered "
                f"({error.strerror}); give the sweep's own overrides again beside resume="
            ) from None
    return [*words, *here]


def quoted(text: str) -> str:
    """A text as the value of an override."""
    return '"' + text.replace('"', '\\"') + '"'


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Make the folder and be the only driver in it; a folder in which no sweep has begun is taken back.

    The kernel gives the lock up when the driver ends, however it ends.

    Raises:
        ConfigError: it cannot be made or written to, or another driver is at work there.
    """
    try:
        descriptor = lock.take(folder)
    except BlockingIOError:
        raise _at_work(folder) from None
    except OSError as error:
        raise ConfigError(f"{_DIR}={folder}: cannot be used: {error.strerror}") from None
    try:
        yield
    finally:
        with suppress(OSError):
            if not _used(folder):
                files.remove(folder, within=folder.parent)
        os.close(descriptor)


def _at_work(folder: Path) -> ConfigError:
    return ConfigError(f"{_DIR}={folder}: another dcpbench is at work in this folder")


def refuse_used(folder: Path, key: str = _DIR) -> None:
    """Make sure that nothing is in `folder`, which `key` of the configuration asks for; writes nothing.

    Raises:
        ConfigError: it cannot be looked into, or it holds something already.
    """
    try:
        used = _used(folder)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"{key}={folder}: cannot be used: {error.strerror}") from None
    if used:
        what = "is not empty; choose a folder that is new or empty"
        if RESULTS_JSONL in used or SWEEP_JSON in used:
            what = "holds another sweep; choose a folder that is new or empty, or go on with resume="
        raise ConfigError(f"{key}={folder}: {what}")


def refuse_unusable(folder: Path, key: str = _DIR, begun: bool = False) -> None:
    """Make sure that a sweep may begin in `folder`, or go on there if it has `begun`; writes nothing.

    Raises:
        ConfigError: it cannot be made or written to, or it holds something already.
    """
    if not begun:
        refuse_used(folder, key)
    if lock.is_held(folder):
        raise _at_work(folder)
    place = next(path for path in (folder, *folder.parents) if path.exists())
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise ConfigError(f"{key}={folder}: cannot be used: {place} cannot be written to")


def _used(folder: Path) -> set[str]:
    """The names in a folder, but for what a driver that was killed before its sweep began may leave there."""
    names = {item.name for item in folder.iterdir()}
    return {name for name in names if name != lock.LOCK and not files.is_temporary(name)}


def claim(folder: Path, key: str) -> None:
    """Make an empty folder that `key` of the configuration asks for.

    Raises:
        ConfigError: it cannot be made or written to, or it holds something already.
    """
    refuse_used(folder, key)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{key}={folder}: cannot be used: {error.strerror}") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"{key}={folder}: cannot be written to")


def _value_of(key: str, arguments: Sequence[str]) -> Any:
    """The value of the last override of a key, None if it is not there or null."""
    words = [word for word in arguments if word.startswith(f"{key}=")]
    if not words:
        return None
    override = OverridesParser.create().parse_override(words[-1])
    if override.is_sweep_override():
        raise ConfigError(f"{words[-1]}: is about the whole sweep and takes one value")
    return override.value() or None
