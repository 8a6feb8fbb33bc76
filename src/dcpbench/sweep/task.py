"""What Hydra sees of a sweep: a task function, through which the launcher and `__main__` know of each other,
and the number that a sweeper is returned for each cell: a metric of its row, named by `objective`."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from dcpbench.config.errors import ConfigError, other_launcher
from dcpbench.core.metrics import METRICS
from dcpbench.records.row import Row

if TYPE_CHECKING:
    from dcpbench.sweep.app import SweepRun

_MAXIMIZES = {"direction": "maximize", "optim.maximize": "true", "ax_config.experiment.minimize": "false"}
"""How the configurations of Hydra's own Optuna, Nevergrad and Ax sweepers say that they maximize."""


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
        launcher = HydraConfig.get().runtime.choices["hydra/launcher"]
        raise other_launcher("hydra.mode=RUN" if launcher == "dcpbench" else f"hydra/launcher={launcher}")


def objective_of(base: DictConfig) -> Callable[[Row | None], float | None]:
    """What gives the number for a row by the composition of a sweep: infinitely bad where there is none, it
    is not ok or the metric is null; None where there is no objective.

    NaN or an exception would do as well, but the Optuna sweeper gives a whole study up for either.

    Raises:
        ConfigError: `objective` is no metric.
    """
    metric = base.objective
    if metric is not None and metric not in METRICS:
        raise ConfigError(f"objective={metric}: is no metric; it may be {', '.join(METRICS)}")
    sweeper = base.hydra.sweeper  # whose setting is an Enum, a text or a flag
    given = ((OmegaConf.select(sweeper, key), value) for key, value in _MAXIMIZES.items())
    maximizes = any(getattr(setting, "name", str(setting)).lower() == value for setting, value in given)
    worst = -math.inf if maximizes else math.inf

    def value_of(row: Row | None) -> float | None:
        if metric is None:
            return None
        value = row.metrics.get(metric) if row is not None and row.is_ok else None
        return worst if value is None else float(value)

    return value_of
