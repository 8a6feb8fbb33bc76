"""From Hydra's lists of overrides to the cells of a sweep."""

import copy
import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra.core.config_loader import ConfigLoader
from omegaconf import DictConfig, OmegaConf, open_dict

from dcpbench.config import Config

_LONGEST_NAME = 150


@dataclass
class SweepCell:
    """One point of the product: its name, how to ask for it again, its configuration, its folder for
    logs and `.hydra/`, and the user's own folder of groups (`--config-dir`), if one was given.

    `hydra_config` is the whole composition, which goes into `.hydra/` and is forgotten then: it is by far
    the largest thing that a driver holds of a cell.
    """

    name: str
    overrides: list[str]
    config: Config
    folder: Path
    config_dir: str | None
    hydra_config: DictConfig | None

    def write_hydra_folder(self) -> None:
        """Make the cell's folder with what Hydra leaves for a job of its own; once."""
        output = self.folder / ".hydra"
        output.mkdir(parents=True)
        composed, self.hydra_config = self.hydra_config, None
        assert composed is not None
        OmegaConf.save(_job(composed), output / "config.yaml")
        OmegaConf.save(OmegaConf.masked_copy(composed, "hydra"), output / "hydra.yaml")
        OmegaConf.save(OmegaConf.create(self.overrides), output / "overrides.yaml")


def compose(
    loader: ConfigLoader, base: DictConfig, job_overrides: Sequence[Sequence[str]]
) -> list[SweepCell]:
    """Compose every cell of a sweep.

    Raises:
        hydra.errors.HydraException, omegaconf.errors.OmegaConfBaseException: an override is wrong.
    """
    cells: list[SweepCell] = []
    names = cell_names(job_overrides)
    for number, (name, overrides) in enumerate(zip(names, job_overrides, strict=True)):
        own = _own(overrides)
        composed = loader.load_sweep_config(base, list(overrides))
        with open_dict(composed):
            composed.hydra.job.id = name
            composed.hydra.job.num = number
        hydra = composed.hydra
        sources = hydra.runtime.config_sources
        cells.append(
            SweepCell(
                name=name,
                overrides=own,
                config=typed(composed),
                folder=Path(str(hydra.sweep.dir)) / str(hydra.sweep.subdir),
                config_dir=next((str(one.path) for one in sources if one.provider == "command-line"), None),
                hydra_config=composed,
            )
        )
    return cells


def cell_names(job_overrides: Sequence[Sequence[str]]) -> list[str]:
    """The names of the cells of a sweep, each another one."""
    names: list[str] = []
    taken: Counter[str] = Counter()
    for overrides in job_overrides:
        name = cell_name(_own(overrides))
        taken[name] += 1
        names.append(f"{name}#{taken[name]}" if taken[name] > 1 else name)
    return names


def _own(overrides: Sequence[str]) -> list[str]:
    """Those that are about the cell and not about Hydra."""
    return [item for item in overrides if not item.lstrip("+~").startswith("hydra")]


def may_compile(base: DictConfig, job_overrides: Sequence[Sequence[str]]) -> bool:
    """Whether a cell is likely to compile, told from the overrides before they are composed.

    Only what the fork server imports depends on it: a wrong guess costs time, nothing else.
    """
    values = {
        value.strip().lower()
        for overrides in job_overrides
        for key, _, value in (item.partition("=") for item in overrides)
        if key == "compile"
    }
    return bool(values - {"false", "no", "off", "0"}) if values else bool(base.get("compile"))


def typed(composed: DictConfig) -> Config:
    """The job's part of a composition as the dataclass it was checked against."""
    config = OmegaConf.to_object(_job(composed))
    assert isinstance(config, Config)
    return config


def _job(composed: DictConfig) -> DictConfig:
    job = copy.deepcopy(composed)
    with open_dict(job):
        del job["hydra"]
    return job


def cell_name(overrides: Sequence[str]) -> str:
    """A name for the cell that is also one for its folder: its overrides, made safe for a path.

    The experiment that it is of is named only if there is nothing else to name it by.
    """
    beside = [item for item in overrides if not item.startswith("experiment=")]
    safe = re.sub(r"[^\w.,=+~#-]+", "_", ",".join(beside or overrides)) or "default"
    if len(safe) <= _LONGEST_NAME:
        return safe
    digest = hashlib.sha256(",".join(overrides).encode()).hexdigest()
    return f"{safe[:_LONGEST_NAME]}~{digest[:12]}"
