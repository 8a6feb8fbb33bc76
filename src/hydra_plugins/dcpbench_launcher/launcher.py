"""The launcher: where Hydra hands over the cells, all of them at once.

Hydra imports this file at every start, so what it needs to run a sweep is imported when one runs.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper, BasicSweeperConf
from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class DcpbenchLauncher(Launcher):
    """Runs the cells of a sweep on ranks of this host, whatever one of them does."""

    def __init__(self) -> None:
        self.config: DictConfig | None = None
        self.hydra_context: HydraContext | None = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Refuse a sweeper that would write into the folder before it is known to be the sweep's."""
        from dcpbench.config.errors import ConfigError

        if config.hydra.sweeper.get("_target_") != SweeperConfig._target_:
            raise ConfigError("hydra/sweeper: dcpbench sweeps with its own sweeper only")
        self.config, self.hydra_context = config, hydra_context

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run all cells. A sweep that is not all well ends the process with its exit status, as
        Hydra's own launcher ends with an exception; verdicts are rows, never Hydra's."""
        from dcpbench.config.conf_folder import conf_folder
        from dcpbench.sweep.app import run_sweep

        assert self.config is not None
        assert self.hydra_context is not None
        status = run_sweep(self.hydra_context.config_loader, self.config, job_overrides, conf_folder())
        if status:
            sys.exit(status)
        return [JobReturn(status=JobStatus.COMPLETED) for _ in job_overrides]


class DcpbenchSweeper(BasicSweeper):
    """Hydra's own product of lists, or the union of products that an experiment names, as one batch.

    The launcher composes the cells, once, refuses a wrong one before it starts any, and only then writes
    into the sweep's folder.
    """

    def __init__(
        self,
        max_batch_size: int | None,
        params: dict[str, str] | None = None,
        matrix: dict[str, dict[str, Any]] | None = None,
    ) -> None:
        super().__init__(max_batch_size, params)
        self.matrix = matrix or {}

    # Static in Hydra, which calls it on its instance; the matrix is the instance's.
    def split_arguments(  # type: ignore[override]
        self, overrides: list[Any], max_batch_size: int | None
    ) -> list[list[list[str]]]:
        """The jobs of a sweep, in batches."""
        if not self.matrix:
            return super().split_arguments(overrides, max_batch_size)
        from hydra.core.override_parser.overrides_parser import OverridesParser

        from hydra_plugins.dcpbench_launcher.matrix import jobs

        assert self.hydra_context is not None
        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        blocks = {
            name: parser.parse_overrides([f"{key}={_listed(values)}" for key, values in block.items()])
            for name, block in self.matrix.items()
        }
        return list(self.split_overrides_to_chunks(jobs(blocks, overrides), max_batch_size))

    def sweep(self, arguments: list[str]) -> Any:
        """Run the product of the lists in `arguments`."""
        from hydra.core.override_parser.overrides_parser import OverridesParser

        from dcpbench.config.errors import ConfigError
        from dcpbench.config.schema import OF_THE_SWEEP, REPEATS
        from hydra_plugins.dcpbench_launcher.matrix import repeated

        if not isinstance(self.launcher, DcpbenchLauncher):
            raise ConfigError("hydra/launcher: dcpbench runs cells with its own launcher only")
        assert self.hydra_context is not None
        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        own, for_all = [], False
        for override in parser.parse_overrides([*self._parse_config(), *arguments]):
            if override.key_or_group not in (*OF_THE_SWEEP, REPEATS):
                own.append(override)
            elif override.is_sweep_override():
                raise ConfigError(f"{override.input_line}: is about the whole sweep and takes one value")
            else:
                for_all = for_all or override.key_or_group == REPEATS
        if self.max_batch_size is not None:
            sys.stderr.write(
                f"dcpbench: hydra.sweeper.max_batch_size={self.max_batch_size} changes nothing: "
                "all cells are one batch\n"
            )
        (jobs,) = self.split_arguments(own, None)
        assert self.config is not None
        jobs = repeated(jobs, self.config.repeats, for_all)
        return [self.launcher.launch(jobs, initial_job_idx=0)]


@dataclass
class LauncherConfig:
    _target_: str = "hydra_plugins.dcpbench_launcher.launcher.DcpbenchLauncher"


@dataclass
class SweeperConfig(BasicSweeperConf):
    """`matrix` maps the name of each block to its keys, and those to lists: `{save: "sync,async"}`."""

    _target_: str = "hydra_plugins.dcpbench_launcher.launcher.DcpbenchSweeper"
    matrix: dict[str, dict[str, Any]] = field(default_factory=dict)


def _listed(values: Any) -> str:
    """A block's values as they stand on the command line, whether YAML took them for a list or not."""
    if isinstance(values, list | tuple):
        return ",".join(_listed(value) for value in values)
    return str(values).lower() if isinstance(values, bool) else str(values)


_store = ConfigStore.instance()
_store.store(group="hydra/launcher", name="dcpbench", node=LauncherConfig, provider="dcpbench")
_store.store(group="hydra/sweeper", name="dcpbench", node=SweeperConfig, provider="dcpbench")
