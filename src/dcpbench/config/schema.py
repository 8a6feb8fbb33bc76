"""The configuration of one cell of the matrix, made of the groups of `conf/`."""

from dataclasses import dataclass, field, make_dataclass
from functools import cache
from pathlib import Path
from typing import Any

from dcpbench.config import groups
from dcpbench.config.errors import ConfigError
from dcpbench.config.groups import how_run, key
from dcpbench.config.save import SaveConfig
from dcpbench.config.state_dict import StateDictConfig
from dcpbench.core.axes import AXES
from dcpbench.core.plugins import load_plugins

OF_THE_SWEEP = ("resume", "trust", "rerun", "plan", "plan_as", "objective", "executor", "nccl")
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

_WITH_AXES = "ConfigWithAxes"

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
    """Limits in seconds. A cell that exceeds one ends as a `timeout` row."""

    cell_s: float = key(300.0, "one attempt of a cell")
    join_s: float | None = key(120.0, "until a rank has started and met its peers")
    build_s: float | None = key(None, "a phase, each time that it begins; null: as long as the cell may take")
    train_s: float | None = key(None, "the same for training")
    save_s: float | None = key(None, "the same for a save")
    upload_s: float | None = key(None, "a save beside training, from when training may go on")
    load_s: float | None = key(None, "the same for a load")
    verify_s: float | None = key(None, "the same for comparisons")
    raw_s: float | None = key(None, "the same for plain files (raw=true)")

    def by_phase(self) -> dict[str, float]:
        """The limit of the whole `cell`, and of each phase that has one."""
        return {name.removesuffix("_s"): limit for name, limit in vars(self).items() if limit is not None}


@dataclass
class Config:
    """One cell of the matrix, and `OF_THE_SWEEP`. What is an axis has its help in `dcpbench.core.axes`."""

    scenario: groups.ScenarioConfig = field(default_factory=groups.ScenarioConfig)
    parallel: groups.ParallelConfig = field(default_factory=groups.ParallelConfig)
    load_parallel: groups.ParallelConfig | None = None
    model: groups.ModelConfig = field(default_factory=groups.ModelConfig)
    optimizer: groups.OptimizerConfig = field(default_factory=groups.OptimizerConfig)
    state_dict: StateDictConfig = field(default_factory=StateDictConfig)
    scheduler: groups.SchedulerConfig = field(default_factory=groups.SchedulerConfig)
    component: groups.ComponentConfig = field(default_factory=groups.ComponentConfig)
    load_into: groups.LoadIntoConfig = field(default_factory=groups.LoadIntoConfig)
    checkpointer: groups.CheckpointerConfig = field(default_factory=groups.CheckpointerConfig)
    save: SaveConfig = field(default_factory=SaveConfig)
    storage: groups.StorageConfig = field(default_factory=groups.StorageConfig)
    fault: groups.FaultConfig = field(default_factory=groups.FaultConfig)
    executor: groups.ExecutorConfig = key(
        groups.ExecutorConfig,
        "where ranks run and what starts them; not part of a cell, except executor.hosts and "
        "executor.ranks_per_host",
    )
    workload: groups.WorkloadConfig = field(default_factory=groups.WorkloadConfig)
    compile: bool = False
    compile_scope: groups.CompileScope | None = key(
        None,
        "with compile=true, what is compiled by itself: the model, each layer (model, layer); null: what "
        "suits the parallelism",
    )
    activation_checkpointing: groups.ActivationCheckpointing | None = None
    deterministic: bool = key(True, "false lets each rank's kernels sum in an order of their own")
    device: groups.Device = groups.Device.auto
    world_size: int | str = "auto"
    load_world_size: int | None = key(None, least=1)
    load_python: str | None = key(
        None,
        "the interpreter, with a torch of its own, of processes that load and did not save: in a scenario "
        "that converts, with verify=deep; null: this one",
    )
    seed: int = 0
    repeats: int = how_run(
        1,
        "runs of each cell; all cells once, then all again, so that a drift of the machine affects all",
    )
    matrix: groups.Matrix = how_run(
        groups.Matrix.product,
        "pairwise: not every combination of the lists, but every two of their values in some cell",
    )
    repeat: int = how_run(0, "which of them this one is")
    train_steps: int = key(2, "optimizer steps before each save", least=1)
    resume_steps: int = key(2, "steps compared after each checkpoint is loaded", least=1)
    optimizer_state: groups.OptimizerStateAs | None = None
    saves: int = key(
        3, "checkpoints a cell writes while it trains; each of them is loaded and verified", least=1
    )
    save_at: int | None = key(
        None, "one more checkpoint at this step; 0 is before the optimizer has any state", least=0
    )
    overlap_saves: bool = key(False, "start each save before the last one is complete")
    raw: bool = how_run(
        False,
        "true: write and read each checkpoint's bytes again in plain files, the limit for save_s and load_s",
    )
    tolerance: groups.Tolerance = key(
        groups.Tolerance.standard,
        "how close the losses of a resume under another layout must come: strict, standard",
    )
    verify: groups.Verify = how_run(
        groups.Verify.standard,
        "deep: at its end a fresh process loads the newest checkpoint, after its cached pages were dropped",
    )
    timeouts: TimeoutsConfig = how_run(TimeoutsConfig)
    retry: int = how_run(
        1,
        "1: a cell that did not come out as it should runs once more, on fresh ranks, unless a second try "
        "has repeated just that; 0: it does not",
    )
    isolation: groups.Isolation = how_run(
        groups.Isolation.warm,
        "warm: ranks stay up until a cell does not end well or leaves their process changed; fresh: new ones "
        "for every cell",
    )
    sharing: groups.Sharing = how_run(
        groups.Sharing.disjoint,
        "none: one cell at a time; disjoint: more where each has its own GPUs; correctness: more in any "
        "case, no times",
    )
    ranks_per_gpu: int | None = how_run(
        None,
        "the most ranks that share a GPU; a cell that needs more is skipped; null: as many as it needs",
        least=1,
    )
    keep_checkpoints: groups.KeepCheckpoints = how_run(
        groups.KeepCheckpoints.failed, "which checkpoints stay on disk after their cell: none, failed, all"
    )
    known_failures: str | None = how_run(None, "a YAML file; null takes conf/known_failures.yaml")
    nccl: str | None = how_run(
        None,
        "path of a libnccl.so.2 that ranks use instead of torch's, as one that lets ranks share a GPU "
        "(2.30); null: DCPBENCH_NCCL, if set",
    )
    resume: str | None = how_run(
        None, "sweep folder to resume: cells that have a valid row there are not run again"
    )
    trust: bool = how_run(
        False,
        "true: with resume, also of a folder that another user has made, whose sweep.json says what runs",
    )
    rerun: groups.Rerun = how_run(
        groups.Rerun.none, "failed: with resume, cells that did not come out as they should run again too"
    )
    plan: bool = how_run(False, "true: tell what would run and how long it would take, and start nothing")
    plan_as: groups.PlanAs = how_run(
        groups.PlanAs.auto,
        "with plan=true: a line a block of the matrix or a line a cell, all of it as JSON; auto: blocks "
        "above 50 cells (auto, blocks, cells, json)",
    )
    part: str | None = how_run(
        None,
        "2/4: the second of four equal parts of the cells, each run by a driver of its own with the same "
        "hydra.sweep.dir",
    )
    objective: str | None = how_run(
        None,
        "the metric, as save_stall_s, whose value a sweeper is returned for each cell (hydra/sweeper=optuna)",
    )

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

    @property
    def most_ranks(self) -> int:
        """How many ranks save or load at once, once the world size is decided."""
        return max(self.world_of(world)[1] for world in (groups.StageWorld.save, groups.StageWorld.load))

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


def config_class() -> type[Config]:
    """Return `Config` with a key for each axis that a plug-in declares, null unless it is set."""
    load_plugins()
    return _with_axes(tuple(name for name in AXES if name not in Config.__dataclass_fields__))


@cache
def _with_axes(names: tuple[str, ...]) -> type[Config]:
    keys = [(name, AXES[name].type | None, key(None, AXES[name].help)) for name in names]
    named = {"__module__": __name__}
    return make_dataclass(_WITH_AXES, keys, bases=(Config,), namespace=named) if names else Config


def __getattr__(name: str) -> Any:
    """Return the class of a configuration that comes from another process."""
    if name == _WITH_AXES:
        return config_class()
    raise AttributeError(name)


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
