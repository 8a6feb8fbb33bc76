"""The sweeper, which makes the cells of a sweep and runs them without a launcher; the groups of plug-ins.

Hydra imports this file at every start. So the task function that it calls brings the code of sweeps.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import product
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from dcpbench.config.errors import ConfigError
from dcpbench.config.groups import Matrix
from dcpbench.config.overrides import of_block
from dcpbench.config.schema import is_about_the_sweep
from dcpbench.config.text import choices
from dcpbench.core.plugins import declared_values, plugins, report_absent
from hydra_plugins.dcpbench_sweeper.matrix import Job, jobs, listed, repeated

_PLUGIN = "plugin"
"""The key of a block that names the plug-in it needs."""


@dataclass
class DcpbenchSweeper(Sweeper):
    """Run every combination of lists, or the blocks of an experiment.

    All cells are composed, and a wrong one is refused, before any is started or written into the folder.
    """

    params: dict[Any, Any] | None
    matrix: dict[str, dict[Any, Any]]

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self._loader, self._config = hydra_context.config_loader, config
        self._run_sweep: Callable[..., int] = task_function

    def sweep(self, arguments: list[str]) -> Any:
        """Run the cells that `arguments` and `hydra.sweeper.params` select.

        Raises:
            ConfigError: an argument is wrong.
            SystemExit: with the exit status of the sweep. Hydra has nothing to do after it.
        """
        sys.exit(self._run_sweep(self._loader, self._config, partial(self._cells, arguments)))

    def _cells(self, arguments: Sequence[str], sweep: Any) -> tuple[list[list[str]], list[str]]:
        """Return the overrides of each cell of a sweep, and its block if the experiment has blocks."""
        cells = self._jobs(arguments, sweep)
        blocks = [cell.block for cell in cells] if all(cell.block for cell in cells) else []
        return [cell.overrides for cell in cells], blocks

    def _jobs(self, arguments: Sequence[str], sweep: Any) -> list[Job]:
        parse = OverridesParser.create(config_loader=self._loader).parse_overrides
        chosen = self._config.hydra.runtime.choices
        defaults = {f"{group}=null" for group in chosen if chosen[group] is None}
        params = of_block("params", self.params or {})
        given = parse([*params, *arguments])
        own = [override for override in given if not is_about_the_sweep(override.key_or_group)]
        about_all = {override.key_or_group: override for override in given if override not in own}
        for override in about_all.values():
            if override.is_sweep_override():
                raise ConfigError(f"{override.input_line}: applies to the complete sweep; pass one value")
        if (recorded := sweep.recorded) is not None:
            return [Job(words) for words in recorded.values()]
        blocks = {
            name: parse(of_block(name, {key: block[key] for key in block if key != _PLUGIN}))
            for name, block in _present(self.matrix).items()
        }

        def combined(lists: Sequence[Sequence[str]], of_block: str | None) -> Iterable[Sequence[str]]:
            """Combine lists as their block says, unless the command line says it for all."""
            how = Matrix(self._config.matrix)
            if of_block and "matrix" not in about_all:
                if of_block not in set(Matrix):
                    raise ConfigError(f"matrix={of_block}: unknown value{choices(of_block, Matrix)}")
                how = Matrix(of_block)
            swept = [values for values in lists if len(values) > 1]
            is_covered = how is Matrix.pairwise and len(swept) > 1 and all(lists)
            rows = sweep.covering(lists) if is_covered else product(*lists)
            return [[word for word in row if word not in defaults] for row in rows]

        cells = (
            jobs(blocks, own, combined) if blocks else [Job([*row]) for row in combined(listed(own), None)]
        )
        return repeated(cells, self._config.repeats, for_all="repeats" in about_all)


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
        return config_path == "" or config_path in declared_values()

    def is_config(self, config_path: str) -> bool:
        values, name = _declared(config_path)
        return name in values

    def available(self) -> bool:
        return True

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        if config_path == "":
            return [] if results_filter is ObjectType.CONFIG else [*declared_values()]
        return [] if results_filter is ObjectType.GROUP else [*declared_values().get(config_path, {})]


@dataclass
class SweeperConfig:
    """`params`: lists by key, as of Hydra's basic sweeper; `matrix`: the blocks by name, each a mapping from
    keys to lists, `{save: [sync, async]}`."""

    _target_: str = "hydra_plugins.dcpbench_sweeper.sweeper.DcpbenchSweeper"
    params: dict[Any, Any] | None = None
    matrix: dict[str, dict[Any, Any]] = field(default_factory=dict)


def _present(matrix: dict[str, dict[Any, Any]]) -> dict[str, dict[Any, Any]]:
    """Return the blocks of an experiment whose plug-ins are installed, and report the others.

    Raises:
        ConfigError: there are blocks, and none of them is left.
    """
    here = {None, *(plugin.name for plugin in plugins())}
    for name, block in matrix.items():
        if block.get(_PLUGIN) not in here:
            report_absent(str(block[_PLUGIN]), f"block {name} of the experiment is left out")
    present = {name: block for name, block in matrix.items() if block.get(_PLUGIN) in here}
    if matrix and not present:
        raise ConfigError("the experiment has no block whose plug-in is installed")
    return present


def _declared(config_path: str) -> tuple[Mapping[str, Any], str]:
    """Return the declared values of a group and a value's name, given a path such as `fault/lost`."""
    group, _, name = config_path.removesuffix(".yaml").rpartition("/")
    return declared_values().get(group, {}), name


_store = ConfigStore.instance()
_store.store(group="hydra/sweeper", name="dcpbench", node=SweeperConfig, provider="dcpbench")
