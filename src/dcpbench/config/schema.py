"""The configuration of one cell of the matrix, made of the groups of `conf/`."""

import math
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path

from dcpbench.config import groups
from dcpbench.config.errors import ConfigError
from dcpbench.config.groups import how_run
from dcpbench.config.save import SaveConfig
from dcpbench.config.state_dict import StateDictConfig

OF_THE_SWEEP = ("resume", "trust", "rerun", "plan", "plan_as", "objective", "executor")
"""Keys that say what to do with a sweep, with those below them: they take one value, and no cell has them."""
OF_ITS_CELLS = ("executor.hosts", "executor.ranks_per_host")
"""Keys below these that every cell has nevertheless; they take one value too."""
REPEATS = "repeats"
"""How often a sweep runs each of its cells, which differ in `repeat` then; takes one value too."""
MATRIX = "matrix"
"""How the values of a sweep's lists are combined; takes one value too."""
PART = "part"
"""Which of its cells are run here; takes one value too."""
OWN_TRAINER = "dcpbench.checkpointers.trainer.TrainerCheckpointer"
"""The checkpointer of a trainer that saves and loads by itself."""
SEED_STRIDE = 1_000_003
"""Apart by so much are the seeds from which the batches of two seeds are drawn; a step's is one more."""

_SECRET = {"key", "secret", "token", "username", "password", "client_kwargs", "config_kwargs", "session"}
"""Options of a file system that are credentials, or may hold some."""

_FRESH = {"DCPBENCH_FRESH_PROCESS": "1"}
"""What keeps processes that load what others have saved apart from ranks that save."""

FRESH_PROCESS = groups.StageConfig(
    "dcpbench.scenarios.fresh_process.load_alone", groups.StageWorld.alone, _FRESH
)
"""The last stage of a cell with `verify=deep`."""

FRESH_TRAINER = groups.StageConfig("dcpbench.scenarios.fresh_process.load_by_trainer", environment=_FRESH)
"""That of a cell whose trainer saves and loads by itself, on as many ranks."""


def is_about_the_sweep(key: str) -> bool:
    """Whether a dotted key or a group, or what it lies below, is the sweep's and no cell's."""
    return key.partition(".")[0] in (*OF_THE_SWEEP, REPEATS, MATRIX, PART) and key not in OF_ITS_CELLS


@dataclass
class TimeoutsConfig:
    """Limits in seconds; a cell that goes past one ends as a `timeout` row.

    `cell_s` is for one try of a cell. The others are for its phases, each time that one begins on a
    rank, and null means that there is only the cell's: `join_s` until a rank has started and met its
    peers, `upload_s` for a save that goes on beside training, from when training may go on.
    """

    cell_s: float = 300.0
    join_s: float | None = 120.0
    build_s: float | None = None
    train_s: float | None = None
    save_s: float | None = None
    upload_s: float | None = None
    load_s: float | None = None
    verify_s: float | None = None
    raw_s: float | None = None

    def by_phase(self) -> dict[str, float]:
        """The limit of the whole `cell`, and of each phase that has one."""
        return {name.removesuffix("_s"): limit for name, limit in vars(self).items() if limit is not None}


@dataclass
class Config:
    """One cell of the matrix, and `OF_THE_SWEEP`."""

    scenario: groups.ScenarioConfig = field(default_factory=groups.ScenarioConfig)
    parallel: groups.ParallelConfig = field(default_factory=groups.ParallelConfig)
    model: groups.ModelConfig = field(default_factory=groups.ModelConfig)
    optimizer: groups.OptimizerConfig = field(default_factory=groups.OptimizerConfig)
    state_dict: StateDictConfig = field(default_factory=StateDictConfig)
    checkpointer: groups.CheckpointerConfig = field(default_factory=groups.CheckpointerConfig)
    save: SaveConfig = field(default_factory=SaveConfig)
    storage: groups.StorageConfig = field(default_factory=groups.StorageConfig)
    fault: groups.FaultConfig = field(default_factory=groups.FaultConfig)
    workload: groups.WorkloadConfig = field(default_factory=groups.WorkloadConfig)
    scheduler: groups.SchedulerConfig = field(default_factory=groups.SchedulerConfig)
    component: groups.ComponentConfig = field(default_factory=groups.ComponentConfig)
    load_into: groups.LoadIntoConfig = field(default_factory=groups.LoadIntoConfig)
    optimizer_state: groups.OptimizerStateAs | None = None
    load_parallel: groups.ParallelConfig | None = None
    load_world_size: int | None = None
    load_python: str | None = None
    compile: bool = False
    compile_scope: groups.CompileScope | None = None
    activation_checkpointing: groups.ActivationCheckpointing | None = None
    deterministic: bool = True
    device: groups.Device = groups.Device.auto
    world_size: int | str = "auto"
    seed: int = 0
    repeat: int = how_run(0)
    repeats: int = how_run(1)
    matrix: groups.Matrix = how_run(groups.Matrix.product)
    part: str | None = how_run(None)
    train_steps: int = 2
    resume_steps: int = 2
    saves: int = 3
    save_at: int | None = None
    overlap_saves: bool = False
    raw: bool = how_run(False)
    tolerance: groups.Tolerance = groups.Tolerance.standard
    verify: groups.Verify = how_run(groups.Verify.standard)
    timeouts: TimeoutsConfig = how_run(TimeoutsConfig)
    retry: int = how_run(1)
    isolation: groups.Isolation = how_run(groups.Isolation.warm)
    sharing: groups.Sharing = how_run(groups.Sharing.disjoint)
    keep_checkpoints: groups.KeepCheckpoints = how_run(groups.KeepCheckpoints.failed)
    known_failures: str | None = how_run(None)
    resume: str | None = how_run(None)
    trust: bool = how_run(False)
    rerun: groups.Rerun = how_run(groups.Rerun.none)
    plan: bool = how_run(False)
    plan_as: groups.PlanAs = how_run(groups.PlanAs.auto)
    objective: str | None = how_run(None)
    executor: groups.ExecutorConfig = field(default_factory=groups.ExecutorConfig)

    @property
    def own_trainer(self) -> bool:
        """Whether `workload.target` builds a trainer that saves by itself."""
        return self.checkpointer.target == OWN_TRAINER

    @property
    def loading(self) -> groups.ParallelConfig:
        """The parallelism that checkpoints are loaded under."""
        return self.load_parallel or self.parallel

    @property
    def stages(self) -> list[groups.StageConfig]:
        """The stages of a cell, one after the other."""
        if self.verify is not groups.Verify.deep:
            return self.scenario.all_stages
        return [*self.scenario.all_stages, FRESH_TRAINER if self.own_trainer else FRESH_PROCESS]

    def world_of(self, world: groups.StageWorld) -> tuple[groups.ParallelConfig, int]:
        """The parallelism and the number of ranks of a stage, once the world size is decided."""
        assert isinstance(self.world_size, int)
        if world is groups.StageWorld.load:
            return self.loading, self.load_world_size or self.world_size
        return self.parallel, self.world_size

    def python_of(self, world: groups.StageWorld) -> str | None:
        """The interpreter of the ranks of a stage; None for the driver's."""
        return None if world is groups.StageWorld.save else self.load_python

    @property
    def compiles_layers(self) -> bool:
        """Whether each layer is compiled by itself."""
        scope = self.compile_scope or self.parallel.compile_scope
        return self.compile and scope is groups.CompileScope.layer

    @property
    def save_steps(self) -> list[int]:
        """The step counts at which a checkpoint is written; 0 is before any optimizer state exists."""
        regular = {self.train_steps * (index + 1) for index in range(self.saves)}
        return sorted(regular | ({self.save_at} if self.save_at is not None else set()))

    @property
    def last_step(self) -> int:
        """How far the uninterrupted run goes: `resume_steps` past the last checkpoint."""
        return self.save_steps[-1] + self.resume_steps

    def value_of(self, axis: str) -> str:
        """The value of an axis as it is written on the command line.

        Raises:
            ConfigError: there is no such axis.
        """
        if axis not in self.__dataclass_fields__:
            raise ConfigError(f"only.{axis}: there is no such axis")
        value = getattr(self, axis)
        return str(value).lower() if isinstance(value, bool) else str(getattr(value, "name", value))

    def check(self) -> None:
        """Refuse values that no machine could run.

        Raises:
            ConfigError: naming the key, its value and what it may be.
        """
        at_least_1 = ("train_steps", "resume_steps", "saves", "load_world_size", "model.batch_size")
        at_least_0 = ("save_at", "storage.keep_free_bytes", "storage.needs_bytes")
        least = dict.fromkeys((*at_least_1, "storage.thread_count", *OF_ITS_CELLS), 1)
        least |= dict.fromkeys(at_least_0, 0)
        for key, lowest in least.items():
            value = attrgetter(key)(self)
            if value is not None and value < lowest:
                raise ConfigError(f"{key}={value}: must be at least {lowest}")
        # What a generator of torch can be seeded with, for the batch of each step.
        low, high = -(2**63) // SEED_STRIDE + 1, (2**64 - 1 - self.last_step) // SEED_STRIDE
        if not low <= self.seed <= high:
            raise ConfigError(f"seed={self.seed}: must be between {low} and {high}")
        if self.own_trainer and self.workload.target is None:
            raise ConfigError(
                "checkpointer=trainer: workload.target=null; must be a function that builds the trainer"
            )
        if self.overlap_saves and len(self.save_steps) < 2:
            raise ConfigError(f"overlap_saves=true: saves={self.saves} leaves nothing to overlap; at least 2")
        if "url" in self.storage.options and not self.storage.url:
            raise ConfigError("storage.options.url=null: must be where objects lie, as s3://bucket/folder")
        if secrets := _SECRET & self.storage.options.get("file_system", {}).keys():
            told = "every row shows it; give it to the client by its own variables or files"
            raise ConfigError(f"storage.options.file_system.{min(secrets)}: is not taken: {told}")
        for phase, limit_s in self.timeouts.by_phase().items():
            if not 0 < limit_s < math.inf:
                raise ConfigError(f"timeouts.{phase}_s={limit_s}: must be a number of seconds, more than 0")
        if self.retry not in (0, 1):
            raise ConfigError(f"retry={self.retry}: must be 0 or 1")
        if self.world_size != "auto" and (isinstance(self.world_size, str) or self.world_size < 1):
            raise ConfigError(f"world_size={self.world_size}: must be 'auto' or a number, at least 1")


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
