"""From Hydra's lists of overrides to the cells of a sweep."""

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig, OmegaConf, open_dict

from dcpbench.config.schema import Config
from dcpbench.sweep.plan.compositions import Compositions

_LONGEST_NAME = 150


@dataclass
class SweepCell:
    """One point of the product: its name, how to ask for it again, its configuration, its folder for
    logs and `.hydra/`, and the user's own folder of groups (`--config-dir`), if one was given.

    The whole composition, which goes into `.hydra/`, is by far the largest thing that there is of a cell:
    it is made when it is needed, and never kept.
    """

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


def compose(
    compositions: Compositions, job_overrides: Sequence[Sequence[str]], names: Sequence[str], first: int = 0
) -> list[SweepCell]:
    """Compose the cells of a batch, whose names are given; `first` is the number of the first in its sweep.

    Raises:
        hydra.errors.HydraException, omegaconf.errors.OmegaConfBaseException: an override is wrong.
    """
    compositions.prepare(job_overrides)
    return [
        _cell(name, number, overrides, compositions)
        for number, (name, overrides) in enumerate(zip(names, job_overrides, strict=True), first)
    ]


def _cell(name: str, number: int, overrides: Sequence[str], compositions: Compositions) -> SweepCell:
    def composed() -> DictConfig:
        job = compositions.of(overrides)
        with open_dict(job):
            job.hydra.job.id = name
            job.hydra.job.num = number
        return job

    job = composed()
    sources = job.hydra.runtime.config_sources
    return SweepCell(
        name=name,
        overrides=_own(overrides),
        folder=Path(str(job.hydra.sweep.dir)) / str(job.hydra.sweep.subdir),
        config_dir=next((str(one.path) for one in sources if one.provider == "command-line"), None),
        config=typed(job),
        composed=composed,
    )


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
    """Whether a cell is likely to compile, judged by the overrides before they are composed.

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
    """The job's part of a composition, which is cut down to it, as the dataclass it was checked against."""
    _leave_out_hydra(composed)
    config = OmegaConf.to_object(composed)
    assert isinstance(config, Config)
    return config


def _leave_out_hydra(composed: DictConfig) -> None:
    with open_dict(composed):
        del composed["hydra"]


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
