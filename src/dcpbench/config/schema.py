"""The configuration of a cell: the groups of `conf/` and single keys, each with its default and help."""

from dataclasses import dataclass, field, fields, is_dataclass, make_dataclass
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from dcpbench.config import groups
from dcpbench.config.errors import ConfigError
from dcpbench.config.groups import SaveConfig, StateDictConfig
from dcpbench.config.keys import OF_SAVING, how_run, key, of_saving
from dcpbench.core.axes import AXES
from dcpbench.core.cell_key import HOW_RUN, digest_of
from dcpbench.core.plugins import load_plugins

EXECUTOR_KEYS_OF_CELLS = ("executor.hosts", "executor.ranks_per_host")
"""Keys below `executor` that every cell has; they take one value in a sweep."""
OWN_TRAINER = "dcpbench.checkpointers.trainer.TrainerCheckpointer"
"""The checkpointer for a trainer that saves and loads itself."""
FEWEST_STEPS = 2
"""Steps before a save and after a load, unless the configuration or a trainer decides."""
SEED_STRIDE = 1_000_003
"""The distance between the seeds of batches of two seeds; the seed of a step's batch is one more."""

ALMOST_AXES = ("executor", "experiment")
"""Groups that no cell differs in."""

_WITH_AXES = "ConfigWithAxes"


@dataclass
class TimeoutsConfig:
    """Limits in seconds. A cell that exceeds one ends as a `timeout` row."""

    cell_s: float = key(300.0, "one attempt of a cell")
    join_s: float | None = key(120.0, "until a rank has started and joined its peers")
    build_s: float | None = key(None, "each build; null: only the limit of the cell")
    train_s: float | None = key(None, "each phase of training")
    save_s: float | None = key(None, "each save, until training can continue")
    upload_s: float | None = key(None, "the background part of an async save")
    load_s: float | None = key(None, "each load")
    verify_s: float | None = key(None, "each phase of comparisons")
    raw_s: float | None = key(None, "plain files (raw=true)")

    def by_phase(self) -> dict[str, float]:
        """Return the limit of the `cell`, and of each phase that has one."""
        return {name.removesuffix("_s"): limit for name, limit in vars(self).items() if limit is not None}


@dataclass
class Config:
    """A cell. The help of an axis is in `dcpbench.core.axes`."""

    scenario: groups.ScenarioConfig = field(default_factory=groups.ScenarioConfig)
    parallel: groups.ParallelConfig = field(default_factory=groups.ParallelConfig)
    load_parallel: groups.ParallelConfig | None = of_saving(None)
    model: groups.ModelConfig = field(default_factory=groups.ModelConfig)
    optimizer: groups.OptimizerConfig = field(default_factory=groups.OptimizerConfig)
    state_dict: StateDictConfig = of_saving(StateDictConfig)
    scheduler: groups.SchedulerConfig = field(default_factory=groups.SchedulerConfig)
    component: groups.ComponentConfig = field(default_factory=groups.ComponentConfig)
    load_into: groups.LoadIntoConfig = of_saving(groups.LoadIntoConfig)
    checkpointer: groups.CheckpointerConfig = of_saving(groups.CheckpointerConfig)
    save: SaveConfig = of_saving(SaveConfig)
    storage: groups.StorageConfig = of_saving(groups.StorageConfig)
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
        "with compile=true, the scope of compilation: model, or each layer (model, layer); null: "
        "depends on the parallelism",
    )
    activation_checkpointing: groups.ActivationCheckpointing | None = None
    deterministic: bool = key(True, "false: allow kernels that sum in a varying order")
    device: groups.Device = groups.Device.auto
    world_size: int | str = "auto"
    load_world_size: int | None = of_saving(None, least=1)
    load_python: str | None = of_saving(
        None,
        "Python interpreter, with another torch, for processes that load and did not save, in a scenario "
        "that converts; null: this one",
    )
    seed: int = 0
    repeat: int = how_run(0, "number of this run, from 0")
    train_steps: int = key(
        0,
        "optimizer steps before each save; 0: two; a trainer (checkpointer=trainer) saves after steps 8, 9, "
        "10, and where an epoch ends",
        least=0,
    )
    resume_steps: int = key(
        0, "steps compared after each checkpoint is loaded; 0: two, of a trainer 23 or more", least=0
    )
    saves: int = key(3, "checkpoints that a cell writes while training; each is loaded and verified", least=1)
    save_at: int | None = key(
        None, "step of a further checkpoint; 0: before the optimizer has state", least=0
    )
    overlap_saves: bool = of_saving(False, "start each save before the previous one is complete")
    restart: bool | None = how_run(
        None,
        "what loads and trains on is a new process of another interpreter than what has saved; null: where "
        "code of yours runs (workload.target, a plug-in) and with verify=deep, in save_load, chain, convert",
    )
    raw: bool = of_saving(
        False,
        "true: also write and read each checkpoint's bytes as plain files, a bound for save_s and load_s",
        how_run=True,
    )
    tolerance: groups.Tolerance = of_saving(
        groups.Tolerance.standard,
        "for losses resumed under another layout: strict, standard",
    )
    verify: groups.Verify = how_run(
        groups.Verify.standard,
        "deep: what loads is a new process, after the cached pages of the files were dropped, in save_load, "
        "chain, convert",
    )
    timeouts: TimeoutsConfig = how_run(TimeoutsConfig)
    retry: int = how_run(
        1,
        "1: run a cell that is not ok once more, on fresh ranks, unless another retry failed in the same "
        "way; 0: never",
    )
    isolation: groups.Isolation = how_run(
        groups.Isolation.warm,
        "warm: reuse ranks until a cell fails or changes their process; fresh: new ranks for every cell",
    )
    sharing: groups.Sharing = how_run(
        groups.Sharing.disjoint,
        "cells at a time; none: one; disjoint: several, each on its own GPUs; correctness: several, without "
        "times",
    )
    ranks_per_gpu: int | None = how_run(
        None,
        "the most ranks that share a GPU; a cell that needs more is skipped; null: as many as it needs",
        least=1,
    )
    keep_checkpoints: groups.KeepCheckpoints = of_saving(
        groups.KeepCheckpoints.failed,
        "checkpoints to keep after their cell: none, failed, all",
        how_run=True,
    )
    known_failures: str | None = how_run(None, "YAML file of known failures; null: conf/known_failures.yaml")

    @property
    def own_trainer(self) -> bool:
        """Whether `workload.target` builds a trainer that saves and loads itself."""
        return self.checkpointer.target == OWN_TRAINER

    @property
    def loading(self) -> groups.ParallelConfig:
        """The parallelism of loads."""
        return self.load_parallel or self.parallel

    @property
    def processes(self) -> list[list[groups.StageConfig]]:
        """The stages of a cell that run in the same processes, in order."""
        # The steps of a trainer are chosen, and `save_at` need not be one of them.
        chosen = self.saves + (self.save_at is not None)
        return self.scenario.processes(self.restarts, chosen if self.own_trainer else len(self.save_steps))

    @property
    def restarts(self) -> bool:
        """Whether what loads is another process than what has saved, after `restart` was decided."""
        return bool(self.restart) and any(stage.restarted for stage in self.scenario.stages)

    def world_of(self, world: groups.StageWorld) -> tuple[groups.ParallelConfig, int]:
        """Return the parallelism and the number of ranks of a stage, after the world size was decided."""
        assert isinstance(self.world_size, int)
        if world is groups.StageWorld.load:
            return self.loading, self.load_world_size or self.world_size
        return self.parallel, self.world_size

    @property
    def most_ranks(self) -> int:
        """The larger of the worlds that save and load, after the world size was decided."""
        return max(self.world_of(world)[1] for world in (groups.StageWorld.save, groups.StageWorld.load))

    def python_of(self, world: groups.StageWorld) -> str | None:
        """Return the interpreter of the ranks of a stage; None is the driver's."""
        return None if world is groups.StageWorld.save else self.load_python

    @property
    def compiles_layers(self) -> bool:
        """Whether each layer is compiled separately."""
        scope = self.compile_scope or self.parallel.compile_scope
        return self.compile and scope is groups.CompileScope.layer

    @property
    def steps_before_save(self) -> int:
        """The number of steps before each save."""
        return self.train_steps or FEWEST_STEPS

    @property
    def steps_after_load(self) -> int:
        """The number of steps that a resumed run takes."""
        return self.resume_steps or FEWEST_STEPS

    @property
    def save_steps(self) -> list[int]:
        """The steps after which a checkpoint is written; 0 is before the optimizer has state."""
        regular = {self.steps_before_save * (index + 1) for index in range(self.saves)}
        return sorted(regular | ({self.save_at} if self.save_at is not None else set()))

    @property
    def last_step(self) -> int:
        """The last step of the uninterrupted run, which ends as long after the last checkpoint as a resumed
        one."""
        return self.save_steps[-1] + self.steps_after_load

    @property
    def training_digest(self) -> str | None:
        """A digest of all keys but those that concern saving or loading alone: cells that have it train the
        same run. None if a cell trains every run itself: with a user's code or a fault, a repeat or retry, or
        on fresh ranks."""
        warm = self.isolation is groups.Isolation.warm
        if self.repeat or self.workload.target or self.fault.target or not warm:
            return None
        kept = [
            config_field.name for config_field in fields(self) if not config_field.metadata.get(OF_SAVING)
        ]
        return digest_of({name: getattr(self, name) for name in kept})

    def value_of(self, axis: str) -> str:
        """Return the value of an axis as it is written on the command line.

        Raises:
            ConfigError: there is no such axis.
        """
        if axis not in self.__dataclass_fields__:
            raise ConfigError(f"only.{axis}: unknown axis")
        value = getattr(self, axis)
        return str(value).lower() if isinstance(value, bool) else str(getattr(value, "name", value))


@dataclass
class SweepConfig:
    """Keys of a sweep, which no cell has. Each takes one value."""

    repeats: int = key(
        1,
        "runs of each cell: all cells once, then all again, so that a drift of the machine affects all",
    )
    matrix: groups.Matrix = key(
        groups.Matrix.product,
        "pairwise: instead of every combination of lists, cells that contain every pair of values",
    )
    part: str | None = key(
        None,
        "2/4: run the second of four parts of the cells; another driver runs each other part with the same "
        "hydra.sweep.dir",
    )
    nccl: str | None = how_run(
        None,
        "path of a libnccl.so.2 to use instead of torch's; 2.30 lets ranks share a GPU; null: DCPBENCH_NCCL, "
        "if set",
    )


def group_names() -> list[str]:
    """Return the names of all groups of `conf/`."""
    return [*(name for name, spec in AXES.items() if spec.group), *ALMOST_AXES]


def is_about_the_sweep(key: str) -> bool:
    """Return whether a dotted key, or a key above it, is a sweep's and not a cell's."""
    name = key.partition(".")[0]
    return name in SweepConfig.__dataclass_fields__ or (
        name == "executor" and key not in EXECUTOR_KEYS_OF_CELLS
    )


def defines_cells(key: str) -> bool:
    """Return whether a dotted key decides which cells a sweep has, or what they measure."""
    return key not in ("", "executor") and not is_how_run(key)


@cache
def is_how_run(key: str) -> bool:
    """Return whether a dotted key only affects how cells run. `repeat` tells the runs of a cell apart."""
    kind: Any = schema_class()
    for name in key.split("."):
        if name not in getattr(kind, "__dataclass_fields__", ()):
            return False
        if kind.__dataclass_fields__[name].metadata.get(HOW_RUN):
            return key != "repeat"
        hint = get_type_hints(kind)[name]
        kind = next(filter(is_dataclass, (hint, *get_args(hint))), None)
    return False


def is_list(key: str) -> bool:
    """Return whether the value of a dotted key is itself a list, as that of `optimizer.betas`."""
    hint: Any = schema_class()
    for name in key.lstrip("+").split("."):
        kind = next(filter(is_dataclass, (hint, *get_args(hint))), None)
        hint = get_type_hints(kind).get(name) if kind else None
    return any(get_origin(hint_or_argument) is list for hint_or_argument in (hint, *get_args(hint)))


def can_be_null(key: object) -> bool:
    """Return whether `key` is a dotted key, and its value can be null."""
    top, dot, _ = str(key).lstrip("+").partition(".")
    hint = get_type_hints(schema_class()).get(top)
    return hint is not None and (bool(dot) or NoneType in get_args(hint))


def config_class() -> type[Config]:
    """Return `Config` with a key for each axis of a plug-in, null by default."""
    load_plugins()
    return _with_axes(tuple(name for name in AXES if name not in Config.__dataclass_fields__))


def schema_class() -> type[Any]:
    """Return the class of what Hydra composes: the keys of a cell, and those of its sweep."""
    return make_dataclass("Schema", (), bases=(SweepConfig, config_class()))


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
    """Return the path of `conf/`: in the installed package, otherwise in the checkout.

    Raises:
        ConfigError: it is in neither.
    """
    here = Path(__file__).resolve().parents[1]
    for folder in (here / "conf", here.parents[1] / "conf"):
        if (folder / "config.yaml").is_file():
            return folder
    raise ConfigError(f"no conf/config.yaml next to {here}: the installation is incomplete")
