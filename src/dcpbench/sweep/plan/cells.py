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
from omegaconf import DictConfig, OmegaConf, open_dict

from dcpbench.config.errors import ConfigError
from dcpbench.config.groups import ExecutorConfig
from dcpbench.config.schema import OF_ITS_CELLS, Config
from dcpbench.sweep.plan import validity
from dcpbench.sweep.plan.composition import Choices, Compositions
from dcpbench.sweep.plan.configurations import Configurations, leave_out_hydra

_LONGEST_NAME = 150
_BY_OVERRIDES = "hydra.job.override_dirname"
_INTERPOLATION = re.compile(r"\$\{([^{}]*)\}")


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
        leave_out_hydra(composed)
        OmegaConf.save(composed, output / "config.yaml")


class _Asked(NamedTuple):
    """A cell that is asked for: its overrides, its name, and its number in the sweep."""

    overrides: tuple[str, ...]
    name: str
    number: int


class CellMaker:
    """Makes the cells of a sweep, batch by batch; `base` is the composition of the sweep itself."""

    def __init__(self, loader: ConfigLoader, base: DictConfig) -> None:
        self._compositions = Compositions(loader, base)
        self._configurations = Configurations(self._compositions)
        self._begun: dict[Choices, tuple[str, DictConfig]] = {}
        self._roots: dict[str, Path] = {}
        sources = base.hydra.runtime.config_sources
        self._of_all = _asked_hosts(base.executor)
        self._config_dir = next((str(one.path) for one in sources if one.provider == "command-line"), None)
        self._names: Counter[str] = Counter()
        self._folders: dict[Path, str] = {}

    def prepare(self, batch: Sequence[Sequence[str]]) -> None:
        """Have Hydra compose what these jobs are put together of, all at once."""
        self._compositions.prepare(batch)

    def config(self, overrides: Sequence[str]) -> Config:
        """The configuration of a job, which is to be no cell yet; it is not to be changed.

        Raises:
            ConfigError, hydra.errors.HydraException, omegaconf.errors.OmegaConfBaseException: an override
                is wrong.
        """
        return self._configurations.of(overrides)

    def cells(self, batch: Sequence[Sequence[str]]) -> list[SweepCell]:
        """The cells of the next batch; each cell of a sweep has another name.

        Raises:
            ConfigError, hydra.errors.HydraException, omegaconf.errors.OmegaConfBaseException: an override
                is wrong, or two cells would share a folder.
        """
        self.prepare(batch)
        return [self._cell(self._asked(tuple(overrides))) for overrides in batch]

    def _asked(self, overrides: tuple[str, ...]) -> _Asked:
        name, number = _cell_name(_own(overrides)), self._names.total()
        self._names[name] += 1
        if self._names[name] > 1:
            name = f"{name}#{self._names[name]}"
        return _Asked(overrides, name, number)

    def _composed(self, asked: _Asked) -> DictConfig:
        job = self._compositions.of(asked.overrides)
        with open_dict(job):
            job.hydra.job.update(id=asked.name, num=asked.number)
        return job

    def _folder(self, asked: _Asked) -> Path:
        """The job's folder. What it is named by is asked once for all jobs that begin alike; the job's whole
        composition is made only where that is more than what is numbered or named for each of them."""
        begun, _ = self._compositions.begun_with(asked.overrides)
        if begun not in self._begun:
            job = self._compositions.of(begun)
            self._begun[begun] = _folder_text(job), job.hydra.job.config.override_dirname
        text, how = self._begun[begun]
        own = {"hydra.job.id": asked.name, "hydra.job.num": str(asked.number)}
        if _BY_OVERRIDES in text:
            own[_BY_OVERRIDES] = self._compositions.dirname(asked.overrides, how)
        text = _INTERPOLATION.sub(lambda found: own.get(found[1], found[0]), text)
        if "${" in text or "\\" in text:
            job = self._composed(asked)
            text = f"{job.hydra.sweep.dir}\n{job.hydra.sweep.subdir}"
        root, _, name = text.partition("\n")
        if root not in self._roots:
            self._roots[root] = Path(root).resolve()
        return self._roots[root] / name

    def _cell(self, asked: _Asked) -> SweepCell:
        config = self._configurations.of(asked.overrides)
        validity.check(config)
        if (own := _asked_hosts(config.executor)) != self._of_all:
            key, value = next(item for item in own.items() if item not in self._of_all.items())
            raise ConfigError(f"{key}={value}: is about the whole sweep and takes one value")
        folder = self._folder(asked)
        if (other := self._folders.setdefault(folder, asked.name)) != asked.name:
            raise ConfigError(f"hydra.sweep.subdir: {other} and {asked.name} would share {folder}")
        composed = partial(self._composed, asked)
        return SweepCell(asked.name, _own(asked.overrides), config, folder, self._config_dir, composed)


def _asked_hosts(executor: DictConfig | ExecutorConfig) -> dict[str, int | None]:
    """The hosts that are asked for, by key."""
    return {key: getattr(executor, key.partition(".")[2]) for key in OF_ITS_CELLS}


def _folder_text(job: DictConfig) -> str:
    """The sweep's folder and below it the job's, a line each, in which the time is the only one resolved."""
    sweep = OmegaConf.to_container(job.hydra.sweep)
    assert isinstance(sweep, dict)

    def resolved(found: re.Match[str]) -> str:
        job.hydra.sweep.subdir = found[0]
        return str(job.hydra.sweep.subdir)

    return re.sub(r"\$\{now:[^{}]*\}", resolved, f"{sweep['dir']}\n{sweep['subdir']}")


def may_compile(base: DictConfig, batch: Sequence[Sequence[str]]) -> bool:
    """Whether a cell is likely to compile, judged by the overrides before they are composed.

    Only what the fork server imports depends on it: a wrong guess costs time, nothing else.
    """
    asked = {item.lower() for overrides in batch for item in overrides if item.startswith("compile=")}
    return bool(asked - {"compile=false"}) if asked else bool(base.compile)


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
