"""From Hydra's lists of overrides to the cells of a sweep."""

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from hydra.core.config_loader import ConfigLoader
from omegaconf import DictConfig, OmegaConf

from dcpbench.config.errors import ConfigError
from dcpbench.config.groups import ExecutorConfig
from dcpbench.config.schema import OF_ITS_CELLS, Config
from dcpbench.sweep import validity
from dcpbench.sweep.composer import Composer, Track

_LONGEST_NAME = 150
_SUBDIR = "${hydra.job.id}"
"""What conf/config.yaml names the folder of a cell: its id is the cell's name."""


@dataclass
class SweepCell:
    """One point of the product: its name, how to ask for it again, its configuration, its folder for
    logs and `.hydra/`, and the user's own folder of groups (`--config-dir`), if one was given. The whole
    composition, by far the largest part, is made when it is needed and never kept."""

    name: str
    overrides: list[str]
    config: Config
    folder: Path
    config_dir: str | None
    composed: Callable[[], dict[str, Any]]

    def write_hydra_folder(self) -> None:
        """Make the cell's folder with what Hydra leaves for a job of its own; once."""
        output = self.folder / ".hydra"
        output.mkdir(parents=True)
        composed = self.composed()
        OmegaConf.save({"hydra": composed.pop("hydra")}, output / "hydra.yaml")
        OmegaConf.save(self.overrides, output / "overrides.yaml")
        OmegaConf.save(composed, output / "config.yaml")


class CellMaker:
    """Makes the cells of a sweep, batch by batch; `base` is the composition of the sweep itself.

    Raises:
        ConfigError: it names the folders of cells itself.
    """

    def __init__(self, loader: ConfigLoader, base: DictConfig) -> None:
        self.composer = Composer(loader, base)
        self._sweep = Path(str(base.hydra.sweep.dir)).resolve()
        sources = base.hydra.runtime.config_sources
        self._of_all = _asked_hosts(base.executor)
        self._config_dir = next((str(one.path) for one in sources if one.provider == "command-line"), None)
        self._names: Counter[str] = Counter()
        subdir = cast("dict[str, str]", OmegaConf.to_container(base.hydra.sweep))["subdir"]
        if subdir != _SUBDIR:
            raise ConfigError(
                f"hydra.sweep.subdir={subdir}: leave it out; the folder of a cell has the cell's name"
            )

    def cells(self, batch: Sequence[Sequence[str]], track: Track = iter) -> list[SweepCell]:
        """The cells of the next batch; each cell of a sweep has another name.

        Args:
            track: as of `Composer.prepare`.

        Raises:
            ConfigError, hydra.errors.HydraException, omegaconf.errors.OmegaConfBaseException: an override
                is wrong.
        """
        self.composer.prepare(batch, track)
        return [self._cell(overrides) for overrides in batch]

    def _cell(self, overrides: Sequence[str]) -> SweepCell:
        config = self.composer.config(overrides)
        validity.check(config)
        if (own := _asked_hosts(config.executor)) != self._of_all:
            key, value = next(item for item in own.items() if item not in self._of_all.items())
            raise ConfigError(f"{key}={value}: is about the whole sweep and takes one value")
        if wrong := [word for word in overrides if word.lstrip("+~").startswith("hydra.sweep.")]:
            raise ConfigError(f"{wrong[0]}: is about the whole sweep and takes one value")
        named = [item for item in overrides if not item.lstrip("+~").startswith("hydra")]
        name, number = _cell_name(named), self._names.total()
        self._names[name] += 1
        if self._names[name] > 1:
            name = f"{name}#{self._names[name]}"
        composed = partial(self._composed, overrides, name, number)
        return SweepCell(name, named, config, self._sweep / name, self._config_dir, composed)

    def _composed(self, overrides: Sequence[str], name: str, number: int) -> dict[str, Any]:
        composed = self.composer.composed(overrides)
        hydra = composed["hydra"]
        return composed | {"hydra": hydra | {"job": hydra["job"] | {"id": name, "num": number}}}


def _asked_hosts(executor: DictConfig | ExecutorConfig) -> dict[str, int | None]:
    """The hosts that are asked for, by key."""
    return {key: getattr(executor, key.partition(".")[2]) for key in OF_ITS_CELLS}


def may_compile(base: DictConfig, batch: Sequence[Sequence[str]]) -> bool:
    """Whether a cell is likely to compile, judged by the overrides before they are composed.

    Only what the fork server imports depends on it: a wrong guess costs time, nothing else.
    """
    asked = {item.lower() for overrides in batch for item in overrides if item.startswith("compile=")}
    return bool(asked - {"compile=false"}) if asked else bool(base.compile)


def _cell_name(overrides: Sequence[str]) -> str:
    """A name for the cell that is also one for its folder: its overrides, made safe for a path.

    The experiment that it is of is named only if there is nothing else to name it by.
    """
    beside = [item for item in overrides if not item.startswith("experiment=")]
    safe = re.sub(r"[^\w.,=+~#-]+", "_", ",".join(beside or overrides)) or "default"
    if len(safe) <= _LONGEST_NAME:
        return safe
    digest = hashlib.sha256(",".join(overrides).encode()).hexdigest()
    return f"{safe[:_LONGEST_NAME]}~{digest[:12]}"
