"""The launcher: where Hydra hands over the cells, all of them at once.

Hydra imports this file at every start, so what it needs to run a sweep is imported when one runs.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
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
    """Hydra's own product of lists, but a sweep that never started leaves no folder behind.

    Cells are composed once, by the launcher, which refuses a wrong one before it starts any.
    """

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
    _target_: str = "hydra_plugins.dcpbench_launcher.launcher.DcpbenchSweeper"


_store = ConfigStore.instance()
_store.store(group="hydra/launcher", name="dcpbench", node=LauncherConfig, provider="dcpbench")
_store.store(group="hydra/sweeper", name="dcpbench", node=SweeperConfig, provider="dcpbench")
