"""The cells of a sweep: their names, configurations and folders."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from omegaconf import DictConfig

from dcpbench.analysis.differing import common_overrides
from dcpbench.compose import limits
from dcpbench.compose.composer import Composer
from dcpbench.config.errors import ConfigError
from dcpbench.config.groups import ExecutorConfig
from dcpbench.config.schema import EXECUTOR_KEYS_OF_CELLS, Config

_LONGEST_NAME = 150  # bytes, of the 255 that a folder's name can have


class CellWords(NamedTuple):
    """The overrides of a cell, its block, if it has one, and its name in a resumed sweep."""

    overrides: list[str]
    block: str = ""
    name: str = ""


@dataclass(frozen=True)
class SweepCell:
    """One cell: its name, its overrides, its configuration, its folder for logs and `.hydra/`, and the user's
    `--config-dir`, if given, and its block of an experiment that has blocks."""

    name: str
    overrides: list[str]
    config: Config
    folder: Path
    config_dir: str | None
    block: str = field(default="", kw_only=True)


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """Writes YAML that OmegaConf reads, thirty times as fast as `OmegaConf.save`."""

    def represent_str(self, text: str) -> Any:
        style = None
        with suppress(ValueError):
            float(text)
            style = "'"  # OmegaConf takes 1e3 for a number, and YAML 1.1 does not
        return self.represent_scalar("tag:yaml.org,2002:str", str(text), style)


_Dumper.add_representer(str, _Dumper.represent_str)
_Dumper.add_multi_representer(str, _Dumper.represent_str)


def write_hydra_folder(folder: Path, overrides: Sequence[str], config: Config) -> None:
    """Make a cell's folder with its overrides and configuration, where Hydra writes them."""
    output = folder / ".hydra"
    output.mkdir(parents=True)
    _save(overrides, output / "overrides.yaml")
    _save(asdict(config), output / "config.yaml")


def _save(plain: Any, path: Path) -> None:
    with path.open("w", encoding="utf-8") as file:
        yaml.dump(plain, file, _Dumper, default_flow_style=False, allow_unicode=True, sort_keys=False)


def cells_of(composer: Composer, base: DictConfig, words: Sequence[CellWords]) -> list[SweepCell]:
    """Return the cells with these words, under their names, or others that differ.

    Args:
        base: the composition of the sweep.

    Raises:
        ConfigError, hydra.errors.HydraException, omegaconf.errors.OmegaConfBaseException: a word is wrong.
    """
    sweep, sources = Path(str(base.hydra.sweep.dir)).resolve(), base.hydra.runtime.config_sources
    config_dir = next((str(source.path) for source in sources if source.provider == "command-line"), None)
    hosts = _hosts(base.executor)
    configs = [_config(composer, cell.overrides, hosts) for cell in words]
    named = [
        [_with_flag(word, config) for word in cell.overrides if not word.lstrip("+~").startswith("hydra")]
        for cell, config in zip(words, configs, strict=True)
    ]
    common = common_overrides(named)
    numbers: Counter[str] = Counter()
    cells = []
    for cell, shown, config in zip(words, named, configs, strict=True):
        if not (name := cell.name):
            name = _name(shown, common)
            numbers[name] += 1
            name += f"#{numbers[name]}" if numbers[name] > 1 else ""
        cells.append(SweepCell(name, shown, config, sweep / name, config_dir, block=cell.block))
    return cells


def _config(composer: Composer, overrides: Sequence[str], hosts: dict[str, int | None]) -> Config:
    """Return the configuration of a cell; refuse one that does not have the sweep's `hosts`."""
    config = composer.config(overrides)
    limits.refuse_impossible(config)
    for key, setting in _hosts(config.executor).items():
        if setting != hosts[key]:
            raise ConfigError(f"{key}={setting}: applies to the complete sweep; pass one value")
    if wrong := [word for word in overrides if word.lstrip("+~").startswith("hydra.sweep.")]:
        raise ConfigError(f"{wrong[0]}: applies to the complete sweep; pass one value")
    return config


def _name(overrides: list[str], common: set[str]) -> str:
    """Return a name for a cell that is safe as the name of its folder: its overrides. A long one leaves out
    the overrides that are `common` to all cells."""
    name = _joined([word for word in overrides if not word.startswith("experiment=")] or overrides)
    if len(name.encode()) <= _LONGEST_NAME:
        return name
    varying = [word for word in overrides if word not in common]
    return _joined(varying or overrides).encode()[:_LONGEST_NAME].decode(errors="ignore")


def _with_flag(override: str, config: Config) -> str:
    """Return an override with its value as `true` or `false` if it sets a flag, however it was typed."""
    key, equals, _ = override.partition("=")
    node: Any = config
    for name in key.lstrip("+").split("."):
        node = node.get(name) if isinstance(node, dict) else getattr(node, name, None)
    return f"{key}={str(node).lower()}" if equals and isinstance(node, bool) else override


def _joined(overrides: Iterable[str]) -> str:
    return re.sub(r"[^\w.,=+~#-]+", "_", ",".join(overrides)) or "default"


def _hosts(executor: DictConfig | ExecutorConfig) -> dict[str, int | None]:
    return {key: getattr(executor, key.partition(".")[2]) for key in EXECUTOR_KEYS_OF_CELLS}
