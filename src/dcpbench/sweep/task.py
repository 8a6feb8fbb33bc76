"""The task function that Hydra is given, through which the launcher and `__main__` know of each other."""

from typing import TYPE_CHECKING

from omegaconf import DictConfig

from dcpbench.config.errors import ConfigError

if TYPE_CHECKING:
    from dcpbench.sweep.app import SweepRun


class SweepTask:
    """Hydra hands it to the launcher, which stores in it the sweep that it runs; `__main__` then ends that
    sweep, whichever sweeper drove it and however it came to its end."""

    def __init__(self) -> None:
        self.sweep: SweepRun | None = None

    def __call__(self, config: DictConfig) -> None:
        """Called for a single job, by another launcher or with hydra.mode=RUN.

        Raises:
            ConfigError: always; cells are run by the launcher, which is given all of a batch.
        """
        raise ConfigError("hydra.mode, hydra/launcher: dcpbench runs cells with its own launcher only")
