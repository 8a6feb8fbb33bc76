"""From Hydra's lists of overrides to the cells of a sweep.

Hydra makes one composition for each choice of groups, and the cells that differ in single values only are
copies of it with those values set: Hydra reads every file and merges it for each job anew, 75 ms for one of
ours; a copy takes 3 ms. Where many choices are to be composed, all cores do it: no rank runs before the
last cell is known to be right.
"""

import hashlib
import multiprocessing
import os
import pickle
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from dcpbench.config.errors import ConfigError
from dcpbench.config.schema import Config
from dcpbench.sweep.signals import leave_to_parent

_LONGEST_NAME = 150
_COMPOSED_S = 5.0
"""How long one composition may take on a machine that has much else to do."""
_WORTH_FORKING = 12
_MOST_WORKERS = 16


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


class Compositions:
    """What Hydra makes of the overrides of a sweep's jobs, batch by batch; `base` is the composition of the
    sweep itself."""

    def __init__(self, loader: ConfigLoader, base: DictConfig) -> None:
        self._loader, self._base = loader, base
        self._parser = OverridesParser.create(config_loader=loader)
        self._parsed: dict[str, Override] = {}
        self._shared: dict[tuple[str, ...], bytes] = {}
        self._names: Counter[str] = Counter()
        self._folders: dict[Path, str] = {}

    def cells(self, batch: Sequence[Sequence[str]]) -> list[SweepCell]:
        """The cells of the next batch; each cell of a sweep has another name.

        Raises:
            ConfigError, hydra.errors.HydraException, omegaconf.errors.OmegaConfBaseException: an override
                is wrong, or two cells would share a folder.
        """
        self.prepare(batch)
        return [self._cell(overrides) for overrides in batch]

    def prepare(self, jobs: Iterable[Sequence[str]]) -> None:
        """Compose the choices of groups of all these jobs, in processes beside this one if they are many.

        What is wrong is left for `of` to tell.
        """
        wanted = dict.fromkeys(self._split(job)[1] for job in jobs)
        workers = min(_MOST_WORKERS, len(os.sched_getaffinity(0)), len(wanted) // _WORTH_FORKING)
        if workers < 2 or threading.active_count() > 1:  # before a second batch, which must not be forked for
            return
        # Forked, they have the loader and all that Hydra has registered.
        global _compositions
        _compositions = self
        with multiprocessing.get_context("fork").Pool(workers, leave_to_parent) as pool:
            pending = pool.map_async(_compose, wanted, chunksize=4)
            with suppress(multiprocessing.TimeoutError):  # a process was stopped: this one composes
                made = pending.get(_COMPOSED_S * len(wanted))
                self._shared |= {choices: it for choices, it in zip(wanted, made, strict=True) if it}

    def of(self, overrides: Sequence[str]) -> DictConfig:
        """The composition of one job, its own to change.

        Raises:
            hydra.errors.HydraException, omegaconf.errors.OmegaConfBaseException: an override is wrong.
        """
        with suppress(HydraException, OmegaConfBaseException):
            return self._copy(overrides)
        return self.composed(overrides)  # which says what is wrong as Hydra says it

    def composed(self, overrides: Sequence[str]) -> DictConfig:
        """What Hydra itself makes of them, from all files; raises what `of` does."""
        return self._loader.load_sweep_config(self._base, list(overrides))

    def _split(self, overrides: Sequence[str]) -> tuple[list[Override], tuple[str, ...]]:
        """The overrides that set values, and the others."""
        values = [item for item in map(self._parse, overrides) if _is_value(item, self._base)]
        lines = {item.input_line for item in values}
        return values, tuple(line for line in overrides if line not in lines)

    def _copy(self, overrides: Sequence[str]) -> DictConfig:
        values, choices = self._split(overrides)
        if choices not in self._shared:
            self._shared[choices] = pickle.dumps(self.composed(choices))
        # The bytes were made here, a line above, or in a process forked from this one.
        job: DictConfig = pickle.loads(self._shared[choices])  # noqa: S301
        if not all(_is_value(override, job) for override in values):
            return self.composed(overrides)
        for override in values:
            OmegaConf.update(job, override.key_or_group, override.value(), merge=True)
        own = [item for item in map(self._parse, overrides) if not item.is_hydra_override()]
        how = job.hydra.job.config.override_dirname
        named = sorted(str(item.input_line) for item in own if item.key_or_group not in how.exclude_keys)
        with open_dict(job):
            job.hydra.overrides.task = [str(item.input_line) for item in own]
            job.hydra.job.override_dirname = how.item_sep.join(named).replace("=", how.kv_sep)
        return job

    def _parse(self, line: str) -> Override:
        if line not in self._parsed:
            self._parsed[line] = self._parser.parse_override(line)
        return self._parsed[line]

    def _cell(self, overrides: Sequence[str]) -> SweepCell:
        own = [item for item in overrides if not item.lstrip("+~").startswith("hydra")]
        name, number = _cell_name(own), self._names.total()
        self._names[name] += 1
        if self._names[name] > 1:
            name = f"{name}#{self._names[name]}"

        def composed() -> DictConfig:
            job = self.of(overrides)
            with open_dict(job):
                job.hydra.job.id = name
                job.hydra.job.num = number
            return job

        job = composed()
        sources = job.hydra.runtime.config_sources
        folder = Path(str(job.hydra.sweep.dir)).resolve() / str(job.hydra.sweep.subdir)
        if (other := self._folders.setdefault(folder, name)) != name:
            raise ConfigError(f"hydra.sweep.subdir: {other} and {name} would share {folder}")
        config_dir = next((str(one.path) for one in sources if one.provider == "command-line"), None)
        config = typed(job)
        config.check()
        return SweepCell(name, own, config, folder, config_dir, composed)


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
    return config


def _leave_out_hydra(composed: DictConfig) -> None:
    with open_dict(composed):
        del composed["hydra"]


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


def _is_value(override: Override, composed: DictConfig) -> bool:
    """Whether an override sets a value that is there, and does not choose a group, nor add or delete."""
    chooses = override.package is not None or override.key_or_group in composed.hydra.runtime.choices
    return override.type is OverrideType.CHANGE and not chooses and not override.is_hydra_override()


_compositions: Compositions
"""Those that processes forked from this one compose for."""


def _compose(choices: tuple[str, ...]) -> bytes:
    """One composition, pickled; nothing where it is wrong."""
    try:
        return pickle.dumps(_compositions.composed(choices))
    except (HydraException, OmegaConfBaseException):
        return b""
