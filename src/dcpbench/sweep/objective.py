"""The number that a sweeper is returned for each cell: a metric of its row, named by `objective`."""

import math
from dataclasses import dataclass

from omegaconf import DictConfig, OmegaConf

from dcpbench.config.errors import ConfigError
from dcpbench.records.metrics import METRICS
from dcpbench.records.row import Row

_SETTINGS = {"direction": "maximize", "optim.maximize": "true", "ax_config.experiment.minimize": "false"}
"""How the configurations of Hydra's own Optuna, Nevergrad and Ax sweepers say that they maximize."""


@dataclass(frozen=True)
class Objective:
    """A metric, None for no objective, and the value that stands for a cell that has none."""

    metric: str | None
    worst: float

    def value_of(self, row: Row | None) -> float | None:
        """The number for a row, infinitely bad where the row is not ok or the metric is null.

        NaN or an exception would do as well, but the Optuna sweeper gives a whole study up for either.
        """
        if self.metric is None:
            return None
        value = row.metrics.get(self.metric) if row is not None and row.is_ok else None
        return self.worst if value is None else float(value)


def objective_of(base: DictConfig) -> Objective:
    """What the composition of a sweep asks for.

    Raises:
        ConfigError: `objective` is no metric.
    """
    metric = base.objective
    if metric is not None and metric not in METRICS:
        raise ConfigError(f"objective={metric}: is no metric; it may be {', '.join(METRICS)}")
    return Objective(metric, -math.inf if _maximizes(base.hydra.sweeper) else math.inf)


def _maximizes(sweeper: DictConfig) -> bool:
    """Whether the sweeper says that it looks for the largest value: an Enum, a text or a flag."""
    given = ((OmegaConf.select(sweeper, key), value) for key, value in _SETTINGS.items())
    return any(getattr(setting, "name", str(setting)).lower() == value for setting, value in given)
