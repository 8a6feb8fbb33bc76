"""Compositions of a sweep's cells: Hydra makes one for each choice of groups, and the cells that differ
in single values only are copies of it with those values set.

Hydra reads every file and merges it for each job anew, 75 ms for one of ours; a copy takes 3 ms. Where many
choices are to be composed, all cores do it: no rank runs before the last cell is known to be right.
"""

import multiprocessing
import os
import pickle
import threading
from collections.abc import Iterable, Sequence

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

_WORTH_FORKING = 12
_MOST_WORKERS = 16


class Compositions:
    """What Hydra makes of the overrides of a sweep's jobs; `base` is the composition of the sweep itself."""

    def __init__(self, loader: ConfigLoader, base: DictConfig) -> None:
        self._loader, self._base = loader, base
        self._parser = OverridesParser.create(config_loader=loader)
        self._parsed: dict[str, Override] = {}
        self._shared: dict[tuple[str, ...], bytes] = {}

    def prepare(self, jobs: Iterable[Sequence[str]]) -> None:
        """Compose the choices of groups of all these jobs, in processes beside this one if they are many.

        What is wrong is left for `of` to tell.
        """
        wanted = dict.fromkeys(self._split(job)[1] for job in jobs)
        workers = min(_MOST_WORKERS, len(os.sched_getaffinity(0)), len(wanted) // _WORTH_FORKING)
        if workers < 2 or threading.active_count() > 1:  # before a second batch, which must not be forked for
            return
        # Forked, they have the loader and all that Hydra has registered.
        with multiprocessing.get_context("fork").Pool(workers, _work_for, (self,)) as pool:
            made = pool.imap(_compose, wanted, chunksize=4)
            self._shared |= {choices: it for choices, it in zip(wanted, made, strict=True) if it}

    def of(self, overrides: Sequence[str]) -> DictConfig:
        """The composition of one job, its own to change.

        Raises:
            hydra.errors.HydraException, omegaconf.errors.OmegaConfBaseException: an override is wrong.
        """
        try:
            return self._copy(overrides)
        except (HydraException, OmegaConfBaseException):
            return self._composed(overrides)  # which says what is wrong as Hydra says it

    def _split(self, overrides: Sequence[str]) -> tuple[list[Override], tuple[str, ...]]:
        """The overrides that set values, and the others."""
        values = [item for item in map(self._parse, overrides) if self._is_value(item, self._base)]
        lines = {item.input_line for item in values}
        return values, tuple(line for line in overrides if line not in lines)

    def _copy(self, overrides: Sequence[str]) -> DictConfig:
        values, choices = self._split(overrides)
        if choices not in self._shared:
            self._shared[choices] = self._made(choices)
        # The bytes were made here, a line above.
        job: DictConfig = pickle.loads(self._shared[choices])  # noqa: S301
        if not all(self._is_value(override, job) for override in values):
            return self._composed(overrides)
        for override in values:
            OmegaConf.update(job, override.key_or_group, override.value(), merge=True)
        own = [item for item in map(self._parse, overrides) if not item.is_hydra_override()]
        with open_dict(job):
            job.hydra.overrides.task = [str(item.input_line) for item in own]
            job.hydra.job.override_dirname = _override_dirname(own, job.hydra.job.config.override_dirname)
        return job

    def _made(self, choices: Sequence[str]) -> bytes:
        return pickle.dumps(self._composed(choices))

    def _composed(self, overrides: Sequence[str]) -> DictConfig:
        return self._loader.load_sweep_config(self._base, list(overrides))

    def _parse(self, line: str) -> Override:
        if line not in self._parsed:
            self._parsed[line] = self._parser.parse_override(line)
        return self._parsed[line]

    def _is_value(self, override: Override, composed: DictConfig) -> bool:
        """Whether an override sets a value that is there, and does not choose a group, nor add or delete."""
        chooses = override.package is not None or override.key_or_group in composed.hydra.runtime.choices
        return override.type is OverrideType.CHANGE and not chooses and not override.is_hydra_override()


def _override_dirname(overrides: Iterable[Override], how: DictConfig) -> str:
    """What `hydra.job.override_dirname` is for these overrides; `how` is what
    `hydra.job.config.override_dirname` says of it."""
    lines = sorted(str(item.input_line) for item in overrides if item.key_or_group not in how.exclude_keys)
    return str(how.item_sep.join(lines).replace("=", how.kv_sep))


_compositions: Compositions
"""In a process that composes for another: whose."""


def _work_for(compositions: Compositions) -> None:
    global _compositions
    _compositions = compositions


def _compose(choices: tuple[str, ...]) -> bytes:
    """One composition; nothing where it is wrong."""
    try:
        return _compositions._made(choices)
    except (HydraException, OmegaConfBaseException):
        return b""
