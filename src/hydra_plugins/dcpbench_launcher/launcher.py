"""The launcher, to which Hydra hands the cells over, all of them at once; the sweeper; and the groups of
plug-ins.

Hydra imports this file at every start, so what runs a sweep is imported when one runs.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import product
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.launcher import Launcher
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from dcpbench.config.errors import ConfigError, other_launcher
from dcpbench.config.groups import Matrix
from dcpbench.config.schema import MATRIX, REPEATS, is_about_the_sweep
from dcpbench.config.text import instead
from dcpbench.core.plugins import declared_values, plugins, report_absent
from hydra_plugins.dcpbench_launcher.matrix import Job, jobs, listed, repeated

_PLUGIN = "plugin"
"""The key of a block that says which plug-in it needs."""


class DcpbenchLauncher(Launcher):
    """Runs the cells of a sweep on ranks of this host, batch by batch, for whichever sweeper asks; `blocks`
    names for each cell the block that asks for it, if there are blocks."""

    blocks: Sequence[str] = ()

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Begin the sweep, and leave it in `task_function` to be ended when Hydra has returned."""
        from dcpbench.cli.run import SweepTask
        from dcpbench.sweep.app import SweepRun

        assert isinstance(task_function, SweepTask)
        own_sweeper = config.hydra.sweeper.get("_target_") == SweeperConfig._target_
        self.sweep = SweepRun(hydra_context.config_loader, config, own_sweeper)
        task_function.sweep = self.sweep

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run the cells of one batch. Every job is completed and returns the value of the objective:
        verdicts are rows, never Hydra's."""
        completed = []
        values = self.sweep.run(job_overrides, self.blocks)
        for overrides, value in zip(job_overrides, values, strict=True):
            job = JobReturn(overrides=list(overrides), status=JobStatus.COMPLETED)
            job.return_value = value
            completed.append(job)
        return completed


@dataclass
class DcpbenchSweeper(Sweeper):
    """The product of lists, or the union of products that an experiment names, as one batch.

    The launcher composes the cells, once, refuses a wrong one before it starts any, and only then writes
    into the sweep's folder.
    """

    max_batch_size: int | None
    params: dict[str, str] | None
    matrix: dict[str, dict[str, Any]]

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Make the launcher.

        Raises:
            ConfigError: it is not dcpbench's own, or a key that is about the sweep is wrong.
        """
        if config.hydra.launcher.get("_target_") != LauncherConfig._target_:
            raise other_launcher(f"hydra/launcher={config.hydra.runtime.choices['hydra/launcher']}")
        self._parser = OverridesParser.create(config_loader=hydra_context.config_loader)
        self._repeats, self._matrix = config.repeats, Matrix(config.matrix)
        self._launcher: Any = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> Any:
        """Run the cells that `arguments` ask for, after `hydra.sweeper.params`."""
        params = [f"{key}={value}" for key, value in (self.params or {}).items()]
        given = self._parser.parse_overrides([*params, *arguments])
        own = [override for override in given if not is_about_the_sweep(override.key_or_group)]
        about_all = {override.key_or_group: override for override in given if override not in own}
        for override in about_all.values():
            if override.is_sweep_override():
                raise ConfigError(f"{override.input_line}: is about the whole sweep and takes one value")
        if self.max_batch_size is not None:
            ignored = f"hydra.sweeper.max_batch_size={self.max_batch_size}"
            sys.stderr.write(f"dcpbench: {ignored} changes nothing: all cells are one batch\n")
        blocks = {
            name: self._parser.parse_overrides(
                [f"{key}={_listed(values)}" for key, values in block.items() if key != _PLUGIN]
            )
            for name, block in _present(self.matrix).items()
        }
        combined = partial(self._combined, for_all=MATRIX in about_all)
        cells = (
            jobs(blocks, own, combined) if blocks else [Job([*row]) for row in combined(listed(own), None)]
        )
        cells = repeated(cells, self._repeats, for_all=REPEATS in about_all)
        self._launcher.blocks = [cell.block for cell in cells] if blocks else []
        return [self._launcher.launch([cell.overrides for cell in cells], initial_job_idx=0)]

    def _combined(
        self, lists: Sequence[Sequence[str]], of_block: str | None, for_all: bool
    ) -> Iterable[Sequence[str]]:
        """Jobs of lists: as a block says itself, unless the command line says it for all."""
        how = self._matrix
        if of_block and not for_all:
            if of_block not in set(Matrix):
                raise ConfigError(f"matrix={of_block}: there is no such matrix{instead(of_block, Matrix)}")
            how = Matrix(of_block)
        swept = [values for values in lists if len(values) > 1]
        if how is Matrix.product or len(swept) < 2 or not all(lists):
            return product(*lists)
        rows: Iterable[Sequence[str]] = self._launcher.sweep.covering(lists)
        return rows


class PluginSearchPath(SearchPathPlugin):
    """Adds the groups of plug-ins: their `conf/`, and the values that they declare in Python."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for plugin in plugins():
            if plugin.conf:
                search_path.append(plugin.name, f"file://{plugin.conf}")
        search_path.append("plugins", "plugins://")


class DeclaredSource(ConfigSource):
    """The values of groups that plug-ins declare in Python. They are not in the ConfigStore: Hydra copies all
    of it for every group that it lists."""

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
class LauncherConfig:
    _target_: str = "hydra_plugins.dcpbench_launcher.launcher.DcpbenchLauncher"


@dataclass
class SweeperConfig:
    """What Hydra's basic sweeper takes, and `matrix`, which maps the name of each block to its keys, and
    those to lists: `{save: "sync,async"}`."""

    _target_: str = "hydra_plugins.dcpbench_launcher.launcher.DcpbenchSweeper"
    max_batch_size: int | None = None
    params: dict[str, str] | None = None
    matrix: dict[str, dict[str, Any]] = field(default_factory=dict)


def _present(matrix: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The blocks of an experiment whose plug-ins are here; the others are reported.

    Raises:
        ConfigError: there are blocks, and none of them is left.
    """
    here = {None, *(plugin.name for plugin in plugins())}
    for name, block in matrix.items():
        if block.get(_PLUGIN) not in here:
            report_absent(str(block[_PLUGIN]), f"block {name} of the experiment is left out")
    present = {name: block for name, block in matrix.items() if block.get(_PLUGIN) in here}
    if matrix and not present:
        raise ConfigError("the experiment has no block whose plug-in is here")
    return present


def _declared(config_path: str) -> tuple[Mapping[str, Any], str]:
    """The declared values of the group of a path such as `fault/lost`, and the name in it."""
    group, _, name = config_path.removesuffix(".yaml").rpartition("/")
    return declared_values().get(group, {}), name


def _listed(values: Any) -> str:
    """A block's values as they stand on the command line, whether YAML took them for a list or not."""
    if isinstance(values, list | tuple):
        return ",".join(_listed(value) for value in values)
    return str(values).lower() if isinstance(values, bool) else str(values)


_store = ConfigStore.instance()
_store.store(group="hydra/launcher", name="dcpbench", node=LauncherConfig, provider="dcpbench")
_store.store(group="hydra/sweeper", name="dcpbench", node=SweeperConfig, provider="dcpbench")
