"""The launcher: where Hydra hands over the cells, all of them at once.

Hydra imports this file at every start, so what it needs to run a sweep is imported when one runs.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
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
        """Refuse a folder that cannot be the sweep's, before Hydra writes anything into it."""
        from dcpbench.sweep.folder import claim

        self.config, self.hydra_context = config, hydra_context
        claim(Path(str(config.hydra.sweep.dir)))

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run all cells. A sweep that is not all well ends the process with its exit status, as
        Hydra's own launcher ends with an exception; verdicts are rows, never Hydra's."""
        from dcpbench.config import conf_folder
        from dcpbench.sweep.app import run_sweep

        assert self.config is not None
        assert self.hydra_context is not None
        status = run_sweep(self.hydra_context.config_loader, self.config, job_overrides, conf_folder())
        if status:
            sys.exit(status)
        return [JobReturn(status=JobStatus.COMPLETED) for _ in job_overrides]


class DcpbenchSweeper(BasicSweeper):
    """Hydra's own product of lists, or the union of products that an experiment names; and a sweep that
    never started leaves no folder behind.

    Cells are composed once, by the launcher, which refuses a wrong one before it starts any.
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
        from dcpbench.sweep.folder import abandon

        assert self.config is not None
        try:
            return super().sweep(arguments)
        except Exception:
            abandon(Path(str(self.config.hydra.sweep.dir)))
            raise

    def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
        """The launcher composes every cell before it starts the first."""


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
