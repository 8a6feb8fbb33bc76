"""The configuration of one cell of the matrix, made of the groups of `conf/`."""

import math
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from dcpbench.config.errors import ConfigError
from dcpbench.config.groups import (
    CheckpointerConfig,
    Device,
    FaultConfig,
    Isolation,
    KeepCheckpoints,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    Rerun,
    SaveConfig,
    ScenarioConfig,
    Sharing,
    StageWorld,
    StorageConfig,
    TimeoutsConfig,
    Tolerance,
    how_run,
)

OF_THE_SWEEP = ("resume", "rerun", "plan", "objective")
"""Keys that say what to do with a sweep: they take one value, and no cell has them."""
REPEATS = "repeats"
"""How often a sweep runs each of its cells, which differ in `repeat` then; takes one value too."""


@dataclass
class Config:
    """One cell of the matrix, and `OF_THE_SWEEP`."""

    scenario: ScenarioConfig = field(default_factory=ScenarioConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    checkpointer: CheckpointerConfig = field(default_factory=CheckpointerConfig)
    save: SaveConfig = field(default_factory=SaveConfig)
    storage: StorageConfig = field(default_factory=StorageConfig)
    fault: FaultConfig = field(default_factory=FaultConfig)
    load_parallel: ParallelConfig | None = None
    load_world_size: int | None = None
    compile: bool = False
    deterministic: bool = True
    device: Device = Device.auto
    world_size: int | str = "auto"
    seed: int = 0
    repeat: int = how_run(0)
    repeats: int = how_run(1)
    train_steps: int = 2
    resume_steps: int = 2
    saves: int = 3
    save_at: int | None = None
    overlap_saves: bool = False
    raw: bool = how_run(False)
    tolerance: Tolerance = Tolerance.standard
    timeouts: TimeoutsConfig = how_run(TimeoutsConfig)
    retry: int = how_run(1)
    isolation: Isolation = how_run(Isolation.warm)
    sharing: Sharing = how_run(Sharing.disjoint)
    keep_checkpoints: KeepCheckpoints = how_run(KeepCheckpoints.failed)
    known_failures: str | None = how_run(None)
    resume: str | None = how_run(None)
    rerun: Rerun = how_run(Rerun.none)
    plan: bool = how_run(False)
    objective: str | None = how_run(None)

    @property
    def loading(self) -> ParallelConfig:
        """The parallelism that checkpoints are loaded under."""
        return self.load_parallel or self.parallel

    def world_of(self, world: StageWorld) -> tuple[ParallelConfig, int]:
        """The parallelism and the number of ranks of a stage, once the world size is decided."""
        assert isinstance(self.world_size, int)
        if world is StageWorld.load:
            return self.loading, self.load_world_size or self.world_size
        return self.parallel, self.world_size

    def value_of(self, axis: str) -> str:
        """The value of an axis as it is written on the command line.

        Raises:
            ConfigError: there is no such axis.
        """
        if axis not in self.__dataclass_fields__:
            raise ConfigError(f"only.{axis}: there is no such axis")
        value = getattr(self, axis)
        if isinstance(value, bool):
            return str(value).lower()
        return str(value.value if isinstance(value, Enum) else getattr(value, "name", value))

    def check(self) -> None:
        """Refuse values that no machine could run.

        Raises:
            ConfigError: naming the key, its value and what it may be.
        """
        for key, value, least, text in (
            ("train_steps", self.train_steps, 1, "at least 1"),
            ("resume_steps", self.resume_steps, 1, "at least 1"),
            ("saves", self.saves, 1, "at least 1"),
            ("model.batch_size", self.model.batch_size, 1, "at least 1"),
            ("storage.thread_count", self.storage.thread_count, 1, "at least 1"),
            ("save_at", self.save_at, 0, "a step, at least 0"),
            ("storage.keep_free_bytes", self.storage.keep_free_bytes, 0, "at least 0 bytes"),
            ("storage.needs_bytes", self.storage.needs_bytes, 0, "at least 0 bytes"),
            ("load_world_size", self.load_world_size, 1, "at least 1 rank"),
        ):
            if value is not None and value < least:
                raise ConfigError(f"{key}={value}: must be {text}")
        plan = Plan(self.train_steps, self.saves, self.resume_steps, self.save_at)
        if self.overlap_saves and len(plan.save_steps) < 2:
            raise ConfigError(f"overlap_saves=true: saves={self.saves} leaves nothing to overlap; at least 2")
        for phase, limit_s in self.timeouts.by_phase().items():
            if not 0 < limit_s < math.inf:
                raise ConfigError(f"timeouts.{phase}_s={limit_s}: must be a number of seconds, more than 0")
        if self.retry not in (0, 1):
            raise ConfigError(f"retry={self.retry}: must be 0 or 1")
        if self.world_size != "auto" and (isinstance(self.world_size, str) or self.world_size < 1):
            raise ConfigError(
                f"world_size={self.world_size}: must be 'auto' or a number of ranks, at least 1"
            )


@dataclass(frozen=True)
class Plan:
    """The steps of a cell: train, save, train, save, …, then the continuation after the last save."""

    train_steps: int
    saves: int
    resume_steps: int
    save_at: int | None = None

    @property
    def save_steps(self) -> list[int]:
        """The step counts at which a checkpoint is written; 0 is before any optimizer state exists."""
        regular = {self.train_steps * (index + 1) for index in range(self.saves)}
        return sorted(regular | ({self.save_at} if self.save_at is not None else set()))

    @property
    def last_step(self) -> int:
        """How far the uninterrupted run goes: `resume_steps` past the last checkpoint."""
        return self.save_steps[-1] + self.resume_steps


def conf_folder() -> Path:
    """Where `conf/` lies: in the installed package, else in the checkout.

    Raises:
        ConfigError: there is neither.
    """
    here = Path(__file__).resolve().parents[1]
    for folder in (here / "conf", here.parents[1] / "conf"):
        if (folder / "config.yaml").is_file():
            return folder
    raise ConfigError(f"no conf/config.yaml beside {here}: the installation is not whole")
