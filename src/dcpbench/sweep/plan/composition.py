"""What Hydra makes of the overrides of a sweep's jobs, without its reading every file anew for each of them.

Hydra composes what the jobs have in common, and each value of a group beside it once, values of several
groups together, 0.1 s each time. Where such values change nothing but the groups' own parts of the
configuration, the compositions of jobs are put together of these parts; one of them is compared with what
Hydra itself makes of it. Overrides that set single
values are then set in a copy, a few milliseconds each.
"""

import pickle
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import zip_longest
from typing import Any, NamedTuple

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, flag_override, open_dict
from omegaconf.errors import OmegaConfBaseException

from dcpbench.config.errors import ConfigError, told_null_choices
from dcpbench.sweep.plan.config_sources import keeps_to_its_group, read_once
from dcpbench.sweep.plan.forked_map import forked_map

Choices = tuple[str, ...]
"""Overrides of a job that do more than to set a value that is there: nearly always to choose of a group."""

_COMPOSED_S = 0.1
_WRONG = (ConfigError, HydraException, OmegaConfBaseException)


class _Part(NamedTuple):
    """A value of a group: what is chosen with it, and its part of the configuration, pickled below it."""

    group: str
    choices: dict[str, str | None]
    own: bytes


class Compositions:
    """The compositions of a sweep's jobs; `base` is that of the sweep itself."""

    def __init__(self, loader: ConfigLoader, base: DictConfig) -> None:
        self._loader, self._base = read_once(loader), base
        self._parser = OverridesParser.create(config_loader=loader)
        self._parsed: dict[str, Override] = {}
        self._values: dict[str, bool] = {}
        self._by_hydra: dict[Choices, bytes] = {}
        self._common: Choices = ()
        self._parts: dict[str, _Part] = {}

    def prepare(self, jobs: Iterable[Sequence[str]]) -> None:
        """Have Hydra compose all that these jobs are put together of, on all cores.

        What is wrong is left for `of` to tell.
        """
        wanted = [*dict.fromkeys(self._split(job)[1] for job in jobs)]
        common = tuple(line for line in wanted[-1] if all(line in choices for choices in wanted))
        chosen = dict.fromkeys(line for choices in wanted for line in choices if line not in common)
        named = [line for line in chosen if self._names_group(line)]
        anyway = tuple(line for line in named if self._is_chosen_anyway(line, common))
        if common != self._common:
            self._common, self._parts = common, {}
        with suppress(*_WRONG):
            self._begin(common)
        beside = self._beside([line for line in named if line not in {*anyway, *self._parts}])
        if len(beside) + 2 < len(wanted):
            self._compose([*((*common, *lines) for lines in beside), wanted[-1]])
            self._parts |= self._parts_of(common, anyway)
            for lines in beside:
                self._parts |= self._parts_of((*common, *lines), lines)
            if self._can_put_together(wanted[-1]) and not self._is_as_by_hydra(wanted[-1]):
                self._parts = {}
        self._compose([choices for choices in wanted if not self._can_put_together(choices)])

    def of(self, overrides: Sequence[str]) -> DictConfig:
        """The composition of one job, its own to change.

        Raises:
            ConfigError, hydra.errors.HydraException, omegaconf.errors.OmegaConfBaseException: an override
                is wrong.
        """
        with suppress(*_WRONG):
            return self._copy(overrides)
        return self.composed(overrides)  # which says what is wrong as Hydra says it

    def begun_with(self, overrides: Sequence[str]) -> tuple[Choices, list[str]]:
        """Those of a job's overrides that may change anything, and the others, of which each changes one
        top-level key of the configuration alone."""
        _, choices = self._split(overrides)
        begun = self._common if self._can_put_together(choices) else choices
        return begun, [line for line in overrides if line not in begun]

    def composed(self, overrides: Sequence[str]) -> DictConfig:
        """What Hydra itself makes of them, from all files; raises what `of` does."""
        with told_null_choices(overrides):
            return self._loader.load_sweep_config(self._base, list(overrides))

    def _begin(self, choices: Choices) -> None:
        if choices not in self._by_hydra:
            self._by_hydra[choices] = pickle.dumps(self.composed(choices))

    def _compose(self, wanted: Sequence[Choices]) -> None:
        """Have Hydra compose these, but what is wrong."""
        new = [choices for choices in dict.fromkeys(wanted) if choices not in self._by_hydra]
        made = forked_map(self._composed_bytes, new, _COMPOSED_S)
        self._by_hydra |= {choices: it for choices, it in zip(new, made, strict=True) if it}

    def _composed_bytes(self, choices: Choices) -> bytes:
        try:
            return pickle.dumps(self.composed(choices))
        except _WRONG:
            return b""

    def _names_group(self, line: str) -> bool:
        """Whether an override chooses of a group whose part of the configuration has the group's name."""
        override = self._parse(line)
        is_choice = override.type is OverrideType.CHANGE and override.package is None
        groups = self._base.hydra.runtime.choices
        return is_choice and override.key_or_group in groups and override.key_or_group in self._base

    def _is_chosen_anyway(self, line: str, common: Choices) -> bool:
        """Whether the sweep's own composition, which is asked for all that is common, has it chosen."""
        override, asked = self._parse(line), self._base.hydra.overrides.task
        chosen = self._base.hydra.runtime.choices.get(override.key_or_group)
        return chosen == override.value() and set(common) <= set(asked)

    def _beside(self, lines: Sequence[str]) -> list[Choices]:
        """Which of these choices are composed together: of each group's the first, the second, and so on;
        each by itself that may change more than its group."""
        alone: list[Choices] = []
        groups: dict[str, list[str]] = {}
        for line in lines:
            chosen = self._parse(line)
            if keeps_to_its_group(self._loader, f"{chosen.key_or_group}/{chosen.value()}"):
                groups.setdefault(chosen.key_or_group, []).append(line)
            else:
                alone.append((line,))
        return [*alone, *(tuple(filter(None, row)) for row in zip_longest(*groups.values()))]

    def _parts_of(self, both: Choices, lines: Choices) -> dict[str, _Part]:
        """What these choices, each of another group, replace in what is common; none of them if that is more
        than the groups' own parts."""
        if not {self._common, both} <= self._by_hydra.keys():
            return {}
        made, groups = self._load(both), [self._parse(line).key_or_group for line in lines]
        choices, rest = _apart(made, groups)
        if both != self._common and rest != _apart(self._load(self._common), groups)[1]:
            return {}
        return {
            line: _Part(group, chosen, pickle.dumps(OmegaConf.masked_copy(made, [group])))
            for line, group, chosen in zip(lines, groups, choices, strict=True)
        }

    def _can_put_together(self, choices: Choices) -> bool:
        asked, common = set(choices), set(self._common)
        return self._common in self._by_hydra and common <= asked <= common | self._parts.keys()

    def _put_together(self, choices: Choices) -> DictConfig:
        job = self._load(self._common)
        with flag_override(job, "no_deepcopy_set_nodes", True):
            for part in (self._parts[line] for line in choices if line in self._parts):
                job[part.group] = pickle.loads(part.own)[part.group]  # noqa: S301 - made above
                with open_dict(job.hydra.runtime.choices):
                    job.hydra.runtime.choices.update(part.choices)
        return job

    def _is_as_by_hydra(self, choices: Choices) -> bool:
        if choices not in self._by_hydra:
            return False
        ours = self.described(self._put_together(choices), choices)
        return bool(OmegaConf.to_container(ours) == OmegaConf.to_container(self._load(choices)))

    def _split(self, overrides: Sequence[str]) -> tuple[list[Override], Choices]:
        """The overrides that set values, and the others."""
        for line in overrides:
            if line not in self._values:
                self._values[line] = _is_value(self._parse(line), self._base)
        values = [self._parse(line) for line in overrides if self._values[line]]
        return values, tuple(line for line in overrides if not self._values[line])

    def _copy(self, overrides: Sequence[str]) -> DictConfig:
        values, choices = self._split(overrides)
        if self._can_put_together(choices):
            job = self._put_together(choices)
        else:
            self._begin(choices)
            job = self._load(choices)
        if not all(_is_value(override, job) for override in values):
            return self.composed(overrides)
        for override in values:
            OmegaConf.update(job, override.key_or_group, override.value(), merge=True)
        return self.described(job, overrides)

    def described(self, job: DictConfig, overrides: Sequence[str]) -> DictConfig:
        """The job, which is made to say of itself by which overrides it was made."""
        own = [str(item.input_line) for item in map(self._parse, overrides) if not item.is_hydra_override()]
        with open_dict(job.hydra):
            job.hydra.overrides.task = own
            job.hydra.job.override_dirname = self.dirname(overrides, job.hydra.job.config.override_dirname)
        return job

    def dirname(self, overrides: Sequence[str], how: DictConfig) -> str:
        """A name for a job's folder, made of its overrides as `hydra.job.config.override_dirname` says."""
        own = [item for item in map(self._parse, overrides) if not item.is_hydra_override()]
        named = sorted(str(item.input_line) for item in own if item.key_or_group not in how.exclude_keys)
        return str(how.item_sep.join(named).replace("=", how.kv_sep))

    def _load(self, choices: Choices) -> DictConfig:
        # The bytes were made above, or in a process forked from this one.
        job: DictConfig = pickle.loads(self._by_hydra[choices])  # noqa: S301
        return job

    def _parse(self, line: str) -> Override:
        if line not in self._parsed:
            self._parsed[line] = self._parser.parse_override(line)
        return self._parsed[line]


def _apart(composed: DictConfig, groups: Sequence[str]) -> tuple[list[dict[str, str | None]], dict[str, Any]]:
    """What is chosen with each of some groups; all but their parts and the overrides that ask for them."""
    rest: Any = OmegaConf.to_container(composed)
    del rest["hydra"]["overrides"]["task"], rest["hydra"]["job"]["override_dirname"]
    chosen, of_groups = rest["hydra"]["runtime"]["choices"], []
    for group in groups:
        rest.pop(group, None)
        named = [name for name in chosen if name == group or name.endswith(f"@{group}")]
        of_groups.append({name: chosen.pop(name) for name in named})
    return of_groups, rest


def _is_value(override: Override, composed: DictConfig) -> bool:
    """Whether an override sets a value that is there, and does not choose a group, nor add or delete."""
    chooses = override.package is not None or override.key_or_group in composed.hydra.runtime.choices
    return override.type is OverrideType.CHANGE and not chooses and not override.is_hydra_override()
