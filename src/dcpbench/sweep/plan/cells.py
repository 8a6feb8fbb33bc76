"""From Hydra's lists of overrides to the cells of a sweep."""

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from hydra.core.config_loader import ConfigLoader
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from dcpbench.config.errors import ConfigError, refuse_unknown
from dcpbench.config.schema import Config
from dcpbench.sweep.plan.composition import Compositions
from dcpbench.sweep.plan.forked_map import forked_map

_LONGEST_NAME = 150
_CONFIGURED_S = 0.01


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
    composed: Callable[[], DictConfig]

    def write_hydra_folder(self) -> None:
        """Make the cell's folder with what Hydra leaves for a job of its own; once."""
        output = self.folder / ".hydra"
        output.mkdir(parents=True)
        composed = self.composed()
        OmegaConf.save(OmegaConf.masked_copy(composed, "hydra"), output / "hydra.yaml")
        OmegaConf.save(OmegaConf.create(self.overrides), output / "overrides.yaml")
        _leave_out_hydra(composed)
        OmegaConf.save(composed, output / "config.yaml")


class _Asked(NamedTuple):
    """A cell that is asked for: its overrides, its name, and its number in the sweep."""

    overrides: tuple[str, ...]
    name: str
    number: int


class _Configured(NamedTuple):
    """What a cell's composition says of it."""

    config: Config
    folder: Path
    config_dir: str | None


class CellMaker:
    """Makes the cells of a sweep, batch by batch; `base` is the composition of the sweep itself."""

    def __init__(self, loader: ConfigLoader, base: DictConfig) -> None:
        self._compositions = Compositions(loader, base)
        self._names: Counter[str] = Counter()
        self._folders: dict[Path, str] = {}

    def cells(self, batch: Sequence[Sequence[str]]) -> list[SweepCell]:
        """The cells of the next batch; each cell of a sweep has another name.

        Raises:
            ConfigError, hydra.errors.HydraException, omegaconf.errors.OmegaConfBaseException: an override
                is wrong, or two cells would share a folder.
        """
        self._compositions.prepare(batch)
        asked = [self._asked(tuple(overrides)) for overrides in batch]
        made = forked_map(self._configured_if_right, asked, _CONFIGURED_S)
        return [
            self._cell(one, known or self._configured(one)) for one, known in zip(asked, made, strict=True)
        ]

    def _asked(self, overrides: tuple[str, ...]) -> _Asked:
        name, number = _cell_name(_own(overrides)), self._names.total()
        self._names[name] += 1
        if self._names[name] > 1:
            name = f"{name}#{self._names[name]}"
        return _Asked(overrides, name, number)

    def _composed(self, asked: _Asked) -> DictConfig:
        job = self._compositions.of(asked.overrides)
        with open_dict(job):
            job.hydra.job.id = asked.name
            job.hydra.job.num = asked.number
        return job

    def _configured(self, asked: _Asked) -> _Configured:
        job = self._composed(asked)
        sources = job.hydra.runtime.config_sources
        folder = Path(str(job.hydra.sweep.dir)).resolve() / str(job.hydra.sweep.subdir)
        config_dir = next((str(one.path) for one in sources if one.provider == "command-line"), None)
        config = typed(job)
        config.check()
        return _Configured(config, folder, config_dir)

    def _configured_if_right(self, asked: _Asked) -> _Configured | None:
        try:
            return self._configured(asked)
        except (ConfigError, HydraException, OmegaConfBaseException):
            return None

    def _cell(self, asked: _Asked, made: _Configured) -> SweepCell:
        if (other := self._folders.setdefault(made.folder, asked.name)) != asked.name:
            raise ConfigError(f"hydra.sweep.subdir: {other} and {asked.name} would share {made.folder}")
        composed = partial(self._composed, asked)
        return SweepCell(
            asked.name, _own(asked.overrides), made.config, made.folder, made.config_dir, composed
        )


def may_compile(base: DictConfig, batch: Sequence[Sequence[str]]) -> bool:
    """Whether a cell is likely to compile, judged by the overrides before they are composed.

    Only what the fork server imports depends on it: a wrong guess costs time, nothing else.
    """
    asked = {item.lower() for overrides in batch for item in overrides if item.startswith("compile=")}
    return bool(asked - {"compile=false"}) if asked else bool(base.compile)


def typed(composed: DictConfig) -> Config:
    """The job's part of a composition, which is cut down to it, as the dataclass it was checked against."""
    _leave_out_hydra(composed)
    config = OmegaConf.to_object(composed)
    assert isinstance(config, Config)
    refuse_unknown(config)
    return config


def _leave_out_hydra(composed: DictConfig) -> None:
    with open_dict(composed):
        del composed["hydra"]


def _own(overrides: Sequence[str]) -> list[str]:
    """The overrides that are not about Hydra itself."""
    return [item for item in overrides if not item.lstrip("+~").startswith("hydra")]


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
