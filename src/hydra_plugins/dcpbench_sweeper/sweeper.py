"""The sweeper of Hydra, which needs no launcher, and the groups of plug-ins. Hydra imports this file at every
start."""

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, cast

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from dcpbench.core.plugins import declared_values, plugins


@dataclass
class DcpbenchSweeper(Sweeper):
    """Hand over what Hydra has composed to the task function, which makes the cells and runs them."""

    params: dict[Any, Any] | None
    matrix: dict[str, dict[Any, Any]]

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self._run = partial(cast("Callable[..., int]", task_function), hydra_context.config_loader, config)

    def sweep(self, arguments: list[str]) -> Any:
        """Run the sweep.

        Raises:
            SystemExit: with the exit status of the sweep. Hydra has nothing to do after it.
        """
        sys.exit(self._run())


class PluginSearchPath(SearchPathPlugin):
    """Add the groups of plug-ins: their `conf/`, and the values that they declare in Python."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for plugin in plugins():
            if plugin.conf:
                search_path.append(plugin.name, f"file://{plugin.conf}")
        search_path.append("plugins", "plugins://")


class DeclaredSource(ConfigSource):
    """Values of groups that plug-ins declare in Python. They are not in the ConfigStore, because Hydra copies
    all of that for every group it lists."""

    @staticmethod
    def scheme() -> str:
        return "plugins"

    def load_config(self, config_path: str) -> ConfigResult:
        values, name = _declared(config_path)
        config = OmegaConf.create(asdict(values[name]))
        return ConfigResult(self.provider, self.full_path(), config, header={"package": None})

    def is_group(self, config_path: str) -> bool:
        return config_path == "" or config_path in _groups()

    def is_config(self, config_path: str) -> bool:
        values, name = _declared(config_path)
        return name in values

    def available(self) -> bool:
        return True

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        if config_path == "":
            return [] if results_filter is ObjectType.CONFIG else [*_groups()]
        return [] if results_filter is ObjectType.GROUP else [*declared_values(config_path)]


@dataclass
class SweeperConfig:
    """`params`: lists by key, as of Hydra's basic sweeper; `matrix`: the blocks by name, each a mapping from
    keys to lists, `{save: [sync, async]}`."""

    _target_: str = "hydra_plugins.dcpbench_sweeper.sweeper.DcpbenchSweeper"
    params: dict[Any, Any] | None = None
    matrix: dict[str, dict[Any, Any]] = field(default_factory=dict)


def _groups() -> set[str]:
    """Return the groups for which plug-ins declare values."""
    return {group for plugin in plugins() for group in plugin.values}


def _declared(config_path: str) -> tuple[dict[str, Any], str]:
    """Return the declared values of a group and a value's name, given a path such as `fault/lost`."""
    group, _, name = config_path.removesuffix(".yaml").rpartition("/")
    return declared_values(group), name


_store = ConfigStore.instance()
_store.store(group="hydra/sweeper", name="dcpbench", node=SweeperConfig, provider="dcpbench")
