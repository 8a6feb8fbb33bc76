"""Which values of a matrix can be in one cell, before its cells are chosen."""

from collections.abc import Sequence

from dcpbench.config.errors import ConfigError
from dcpbench.config.groups import Only
from dcpbench.config.schema import Config
from dcpbench.executors.fork_server import Machine
from dcpbench.sweep import validity
from dcpbench.sweep.composer import Composer, Track


class Runnable:
    """What of the product of some lists of overrides this machine can run.

    Raises:
        ConfigError, hydra.errors.HydraException, omegaconf.errors.OmegaConfBaseException: an override is
            wrong by itself.
    """

    def __init__(
        self, composer: Composer, machine: Machine, lists: Sequence[Sequence[str]], track: Track = iter
    ) -> None:
        self._composer, self._machine = composer, machine
        of_all = [values[0] for values in lists if len(values) == 1]
        swept = [value for values in lists if len(values) > 1 for value in values]
        composer.prepare([[*of_all, value] for value in swept], track)
        alone = {value: composer.config([*of_all, value]) for value in swept}
        self._values = {value: _value(value, config) for value, config in alone.items()}
        self._only = {value: _only(value, config) for value, config in alone.items()}
        self._several_sizes = validity.has_several_sizes(alone.values())

    def runs(self, overrides: Sequence[str]) -> bool:
        """Whether a cell with these overrides would run."""
        try:
            asked = self._composer.config(overrides)
            validity.check(asked)
            resolved = validity.resolve(asked, self._machine)
            return validity.why_skip(asked, resolved, self._machine, self._several_sizes, overrides) is None
        except ConfigError:
            return False

    def excludes(self, one: str, other: str) -> bool:
        """Whether one of two values says of itself that it cannot be with the other."""
        return self._takes_not(one, other) or self._takes_not(other, one)

    def _takes_not(self, one: str, other: str) -> bool:
        axis, value = self._values.get(other, ("", ""))
        only = self._only.get(one, {}).get(axis)
        return only is not None and value not in only.values


def _key(override: str) -> str:
    return override.lstrip("+").partition("=")[0]


def _value(override: str, config: Config) -> tuple[str, str]:
    """The axis that an override is about, and its value there; without a name for what is none."""
    key = _key(override)
    return (key, config.value_of(key)) if key in vars(config) else ("", "")


def _only(override: str, config: Config) -> dict[str, Only]:
    only: dict[str, Only] = getattr(vars(config).get(_key(override)), "only", {})
    return only
