"""Read the words of a command, each once: what they ask for, and which sweep they resume.

A refusal is a ConfigError.
"""

import os
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dcpbench.compose.cells import CellWords
from dcpbench.config.errors import ConfigError
from dcpbench.config.overrides import quoted
from dcpbench.config.schema import (
    SweepConfig,
    defines_cells,
    is_about_the_sweep,
    is_how_run,
    schema_class,
)
from dcpbench.config.text import did_you_mean
from dcpbench.sweep.folder import DIR, SweepRecord
from dcpbench.sweep.signals import Signals

_PATHS = ("storage.root", "known_failures", "nccl")
"""Keys of paths that can be passed to a resumed sweep."""
_CONFIG_DIR = "--config-dir="


@dataclass(frozen=True)
class Options:
    """The options of a command that are not about its cells.

    Args:
        resume: the folder of a sweep to resume; `trust` it if it is another user's; run cells again whose row
            is not ok with `rerun_failed`.
        plan: how to print a plan: table, markdown or json; empty: run the cells. `every` cell is a line.
    """

    resume: Path | None = None
    trust: bool = False
    rerun_failed: bool = False
    plan: str = ""
    every: bool = False


@dataclass(frozen=True)
class Request:
    """The request of a command: its words, those of a resumed sweep first, as in the folder where they were
    typed; and what Hydra has composed from them.

    Args:
        record: that of the sweep, as it is with these words.
        began: when the command began, of `time.monotonic`.
        base: the composition of the sweep itself, a DictConfig; `loader`, a ConfigLoader, composes its cells.
    """

    overrides: tuple[Override, ...]
    config_dir: Path | None
    options: Options
    record: SweepRecord
    signals: Signals
    began: float
    loader: Any = None
    base: Any = None

    @classmethod
    def of(
        cls,
        overrides: Sequence[Override],
        config_dir: Path | None,
        options: Options,
        signals: Signals,
        began: float,
    ) -> "Request":
        """Return the request of these words; enter the folder in which a resumed sweep was typed.

        Raises:
            ConfigError, hydra.errors.HydraException: the folder to resume has no sweep, or another user's
                without `--trust`; words ask for other cells than the recorded ones; the folder in which the
                sweep was typed was removed.
        """
        record = SweepRecord([], "", {}, [])
        if options.resume is not None:
            folder = options.resume.resolve()
            record = SweepRecord.read(folder)
            if not options.trust:
                record.refuse_foreign(folder)
            recorded = [word for word in record.arguments if not word.startswith(_CONFIG_DIR)]
            before = OverridesParser.create().parse_overrides(recorded)
            _refuse_other_cells(f"resume {options.resume}", overrides, before, record)
            typed, config_dir = [*map(_from_here, overrides)], config_dir and config_dir.resolve()
            try:
                os.chdir(record.cwd)
            except OSError as error:
                raise ConfigError(
                    f"resume {options.resume}: cannot enter {record.cwd}, where it was typed "
                    f"({error.strerror}); make that folder, or a link from there to its new place"
                ) from None
            words = [word for word in record.arguments if word.startswith(_CONFIG_DIR)]
            config_dir = config_dir or next((Path(word.removeprefix(_CONFIG_DIR)) for word in words), None)
            by_key = {
                _key(override): override for override in (*before, *typed, _parsed(f"{DIR}={quoted(folder)}"))
            }
            overrides = [*by_key.values()]
        elif options.trust or options.rerun_failed:
            option = "--trust" if options.trust else "--rerun-failed"
            raise ConfigError(f"{option}: needs --resume FOLDER")
        kept = [override for override in overrides if override.key_or_group != DIR]
        record = replace(record, arguments=_words(kept, config_dir), cwd=str(Path.cwd()))
        return cls(tuple(overrides), config_dir, options, record, signals, began)

    @property
    def words(self) -> list[str]:
        """The words that Hydra reads. An option comes first: words on both sides are refused."""
        return _words(self.overrides, self.config_dir)

    @property
    def is_resumed(self) -> bool:
        """Whether the sweep has begun before."""
        return bool(self.record.cells)

    @cached_property
    def sweep(self) -> SweepConfig:
        """The keys of the sweep, as Hydra has composed them."""
        names = [sweep_field.name for sweep_field in fields(SweepConfig)]
        return SweepConfig(**OmegaConf.to_object(OmegaConf.masked_copy(self.base, names)))  # type: ignore[arg-type]

    @property
    def folder(self) -> Path:
        """The folder of the sweep."""
        return Path(str(self.base.hydra.sweep.dir)).resolve()

    @property
    def recorded(self) -> list[CellWords]:
        """The words with which a resumed sweep runs each cell: the recorded ones, and those that say how all
        cells run."""
        how = {
            _key(override): f"{override.get_key_element()}={override.get_value_element_as_str()}"
            for override in self.overrides
            if is_how_run(override.key_or_group)
            and not is_about_the_sweep(override.key_or_group)
            and not override.is_sweep_override()  # it selects cells
        }
        cells = {
            name: {word.lstrip("+~").partition("=")[0]: word for word in words} | how
            for name, words in self.record.cells.items()
        }
        block_of = self.record.blocks
        return [CellWords([*words.values()], block_of.get(name, ""), name) for name, words in cells.items()]

    @property
    def may_compile(self) -> bool:
        """Whether a cell compiles, guessed before cells are composed. It only decides what is imported early:
        a wrong guess costs time and nothing else."""
        blocks = [block.get("compile", False) for block in self.base.hydra.sweeper.matrix.values()]
        typed = [
            str(override.input_line) for override in self.overrides if override.key_or_group == "compile"
        ]
        texts = typed or map(str, [self.base.compile, *blocks])
        return any("true" in text.lower() for text in texts)


def value_of(key: str, overrides: Sequence[Override]) -> Any:
    """Return the value of the last override of a key, None if it is missing or null."""
    override = next((candidate for candidate in reversed(overrides) if candidate.key_or_group == key), None)
    if override is None or override.type is OverrideType.DEL:
        return None
    if override.is_sweep_override():
        raise ConfigError(f"{override.input_line}: applies to the complete sweep; pass one value")
    value = override.value()
    with suppress(OmegaConfBaseException):  # an interpolation that only Hydra can resolve
        value = OmegaConf.create([value])[0]
    return value


def _words(overrides: Sequence[Override], config_dir: Path | None) -> list[str]:
    first_words = [f"{_CONFIG_DIR}{config_dir}"] if config_dir else []
    return [*first_words, *(str(override.input_line) for override in overrides)]


def _refuse_other_cells(
    asked: str, typed: Sequence[Override], recorded: Sequence[Override], record: SweepRecord
) -> None:
    """Refuse words about the cells of a resumed sweep that are not recorded, and lists."""
    known = {*map(_item, recorded)}
    others = [override for override in typed if _item(override) not in known]
    wrong = [override for override in others if defines_cells(override.key_or_group)]
    if wrong:
        names = [schema_field.name for schema_field in fields(schema_class())]
        tops = [override.key_or_group.partition(".")[0] for override in wrong]
        unknown = next((top for top in tops if top not in (*names, "experiment", "hydra")), None)
        near = did_you_mean(unknown, [name for name in names if not defines_cells(name)]) if unknown else ""
        words = shlex.join(str(override.input_line) for override in wrong)
        raise ConfigError(
            f"{asked}: the cells of that sweep, `{record.command}`, are recorded; leave out {words}, or run "
            f"another sweep{near}"
        )
    for override in others:
        if override.is_sweep_override():
            raise ConfigError(
                f"{override.input_line}: applies to all cells of a resumed sweep; pass one value"
            )


def _parsed(word: str) -> Override:
    return OverridesParser.create().parse_override(word)


def _key(override: Override) -> str:
    return str(override.get_key_element()).lstrip("+~")


def _item(override: Override) -> tuple[str, str]:
    """Return the key and the value of a word, which are the same however it is spelled."""
    return _key(override), str(override.value())


def _from_here(override: Override) -> Override:
    """Return an override such that a relative path in it means the same in another folder."""
    value = value_of(override.key_or_group, [override]) if override.key_or_group in _PATHS else None
    if not value or "${" in str(override.input_line) or Path(str(value)).is_absolute():
        return override
    return _parsed(f"{override.get_key_element()}={quoted(Path(str(value)).resolve())}")
