"""The schema of `conf/`: one dataclass for each group.

Hydra merges every YAML file and every override into these classes, so an unknown key or a wrong
type is refused before anything starts. They are not frozen, because OmegaConf marks a node made
from a frozen dataclass read-only and then refuses to merge the YAML into it.

`target` is always the dotted path of the function or class that a YAML stands for; it is resolved
in the rank processes only, so that this module (and with it the driver) needs no torch.
"""

import math
from dataclasses import dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Any

from omegaconf import MISSING

MESH_DIMENSIONS = ("dp_replicate", "dp_shard", "tp")
REST = -1
"""A mesh size that stands for whatever the other dimensions leave of the world size."""


class ConfigError(Exception):
    """What the user asked for cannot be run as it stands: one line for the terminal, exit status 2."""


class Device(Enum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class KeepCheckpoints(Enum):
    """Whose checkpoints stay on disk after their cell has ended."""

    none = "none"
    failed = "failed"
    all = "all"


class Rerun(Enum):
    """Which cells of a sweep that is resumed run again, besides those that have no row that stands."""

    none = "none"
    failed = "failed"


class Isolation(Enum):
    """Whether ranks stay up from cell to cell; after anything but a pass they are replaced anyway."""

    warm = "warm"
    fresh = "fresh"


class Place(Enum):
    """Where a fault is planted."""

    restored = "restored"
    live = "live"
    staged = "staged"
    written = "written"


class Sharing(Enum):
    """Which cells run at the same time: none; those that have GPUs of their own each; with `correctness`
    also several on the same GPUs, or the CPU, whose times then say nothing and are null."""

    none = "none"
    disjoint = "disjoint"
    correctness = "correctness"


class Tolerance(Enum):
    """The named tolerance profiles of `dcpbench.verify.tolerances`."""

    strict = "strict"
    standard = "standard"


def conf_folder() -> Path:
    """The installed package's own `conf`, else the checkout's.

    Raises:
        ConfigError: there is neither.
    """
    here = Path(__file__).resolve().parents[1]
    for folder in (here / "conf", here.parents[1] / "conf"):
        if (folder / "config.yaml").is_file():
            return folder
    raise ConfigError(f"no conf/config.yaml beside {here}: the installation is not whole")


@dataclass
class Only:
    """The values of an axis that a scenario or a fault makes sense with, and why with no others."""

    values: list[str] = MISSING
    because: str = MISSING


@dataclass
class ScenarioConfig:
    """What a cell does: `target(cell, **options)` with a `dcpbench.scenarios.cell.Cell`.

    `only` limits axes of the configuration: a cell with another value is a skip. `converts` says that
    it loads under `load_parallel`. Without a `process_group` it runs in one process that has none.
    """

    name: str = MISSING
    target: str = MISSING
    only: dict[str, Only] = field(default_factory=dict)
    converts: bool = False
    process_group: bool = True
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class ParallelConfig:
    """How a model is spread over the ranks: `target(model, mesh, config)` returns the wrapped model.

    `mesh` names the dimensions that this parallelism has, outermost first, out of `MESH_DIMENSIONS`;
    the three sizes say how large each is. An empty `mesh` means an unwrapped replica on every rank.
    `tp_plan` is the model's, unless another is given.
    """

    name: str = MISSING
    target: str = MISSING
    mesh: list[str] = field(default_factory=list)
    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    tp_plan: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    def mesh_sizes(self, world_size: int) -> dict[str, int]:
        """The size of each mesh dimension on `world_size` ranks, outermost first.

        Raises:
            ConfigError: the sizes are not positive, name a dimension that this parallelism does not
                have, or do not multiply to the world size.
        """
        given = {"dp_replicate": self.dp_replicate, "dp_shard": self.dp_shard, "tp": self.tp}
        for name, size in given.items():
            if name not in self.mesh and size != 1:
                has = " × ".join(self.mesh) or "no mesh"
                raise ConfigError(
                    f"parallel.{name}={size}: parallel={self.name} has no {name} dimension ({has})"
                )
        if unknown := [name for name in self.mesh if name not in given]:
            known = ", ".join(MESH_DIMENSIONS)
            raise ConfigError(f"parallel.mesh: unknown dimension {unknown[0]!r}; known are {known}")
        sizes = {name: given[name] for name in self.mesh}
        if not sizes:
            return {}
        for name, size in sizes.items():
            if size < 1 and size != REST:
                raise ConfigError(f"parallel.{name}={size}: a mesh size is at least 1, or -1 for the rest")
        rest = [name for name, size in sizes.items() if size == REST]
        if len(rest) > 1:
            raise ConfigError(f"parallel: only one of {', '.join(rest)} may be -1 (the rest)")
        fixed = math.prod(size for size in sizes.values() if size != REST)
        wanted = " × ".join(f"{name}={size}" for name, size in sizes.items())
        if rest and world_size % fixed == 0:
            sizes[rest[0]] = world_size // fixed
        if math.prod(sizes.values()) != world_size:
            verb = "cannot be made to multiply" if rest else "multiplies"
            amount = "" if rest else f" to {fixed}, not"
            raise ConfigError(
                f"parallel={self.name}: the mesh {wanted} {verb}{amount} to the world size {world_size}"
            )
        return sizes


def dp_degree(sizes: dict[str, int], world_size: int) -> int:
    """How many parts a global batch has on a mesh of these sizes: tp shares its data, and without a
    mesh every rank sees the whole."""
    return world_size // sizes.get("tp", 1) if sizes else 1


@dataclass
class ModelConfig:
    """A model: `target(**options)`, whose `input_size` and `output_size` shape its batches.

    `batch_size` is the global batch; every data-parallel rank sees an equal share of it. `tp_plan`
    says which modules tensor parallelism shards, and how: colwise or rowwise. One that
    `requires_accelerator` is too large for ranks that share a CPU and its memory.
    """

    name: str = MISSING
    target: str = MISSING
    batch_size: int = 24
    requires_accelerator: bool = False
    tp_plan: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class OptimizerConfig:
    """An optimizer: `target(groups(model), lr=..., ...)`; what is null is left to its default."""

    name: str = MISSING
    target: str = MISSING
    groups: str = "dcpbench.workloads.param_groups.one"
    lr: float = MISSING
    weight_decay: float | None = None
    momentum: float | None = None
    betas: list[float] | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def hyperparameters(self) -> dict[str, Any]:
        """Keyword arguments for the optimizer's constructor."""
        given = {
            "lr": self.lr,
            "weight_decay": self.weight_decay,
            "momentum": self.momentum,
            "betas": tuple(self.betas) if self.betas is not None else None,
        }
        return {name: value for name, value in given.items() if value is not None} | self.options


@dataclass
class SaveConfig:
    """How a checkpoint is written: `target(state_dict, checkpoint_id, writer, process_group)`.

    `asynchronous` says that training may go on before the checkpoint is complete.
    """

    name: str = MISSING
    target: str = MISSING
    asynchronous: bool = False
    cache_staged_state_dict: bool = False
    requires_accelerator: bool = False
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class StorageConfig:
    """Where checkpoints lie: `target(config, save)` returns a `dcpbench.checkpointers.storage.Storage`.

    `root` is a folder for checkpoints outside the sweep's own; null keeps them in the cell's folder.
    A cell is skipped where it would leave less than `keep_free_bytes` free. `needs_bytes` is what it
    writes; null takes what cells like it took up.
    """

    name: str = MISSING
    target: str = MISSING
    root: str | None = None
    thread_count: int = 1
    sync_files: bool = True
    keep_free_bytes: int = 2**30
    needs_bytes: int | None = None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class FaultConfig:
    """A defect planted on purpose by `target`, null for none, and what has to stand in the row's reason.

    `at` says where: after a load in what was `restored`, in the `live` state right after a save, in
    what is `staged` to be saved, in the files that were `written`. The modules of
    `dcpbench.faults` say what `target` is called with. `sees` is a regular expression.
    """

    name: str = MISSING
    target: str | None = None
    at: Place = Place.restored
    sees: str = ""
    only: dict[str, Only] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


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

    def of_phases(self) -> dict[str, float]:
        """The limit of each phase that has one."""
        given = {item.name.removesuffix("_s"): getattr(self, item.name) for item in fields(self)}
        return {name: limit for name, limit in given.items() if limit is not None and name != "cell"}


OF_THE_SWEEP = ("resume", "rerun", "plan")
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
    save: SaveConfig = field(default_factory=SaveConfig)
    storage: StorageConfig = field(default_factory=StorageConfig)
    fault: FaultConfig = field(default_factory=FaultConfig)
    load_parallel: ParallelConfig | None = None
    compile: bool = False
    deterministic: bool = True
    device: Device = Device.auto
    world_size: int | str = "auto"
    seed: int = 0
    repeat: int = 0
    repeats: int = 1
    train_steps: int = 2
    resume_steps: int = 2
    saves: int = 3
    save_at: int | None = None
    overlap_saves: bool = False
    raw: bool = False
    tolerance: Tolerance = Tolerance.standard
    timeouts: TimeoutsConfig = field(default_factory=TimeoutsConfig)
    retry: int = 1
    isolation: Isolation = Isolation.warm
    sharing: Sharing = Sharing.disjoint
    keep_checkpoints: KeepCheckpoints = KeepCheckpoints.failed
    known_failures: str | None = None
    resume: str | None = None
    rerun: Rerun = Rerun.none
    plan: bool = False

    @property
    def loading(self) -> ParallelConfig:
        """The parallelism that checkpoints are loaded under."""
        return self.load_parallel or self.parallel

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
        at_least_one = {
            "train_steps": self.train_steps,
            "resume_steps": self.resume_steps,
            "saves": self.saves,
            "model.batch_size": self.model.batch_size,
            "storage.thread_count": self.storage.thread_count,
        }
        for key, value in at_least_one.items():
            if value < 1:
                raise ConfigError(f"{key}={value}: must be at least 1")
        if self.save_at is not None and self.save_at < 0:
            raise ConfigError(f"save_at={self.save_at}: must be a step, at least 0")
        plan = Plan(self.train_steps, self.saves, self.resume_steps, self.save_at)
        if self.overlap_saves and len(plan.save_steps) < 2:
            raise ConfigError(f"overlap_saves=true: saves={self.saves} leaves nothing to overlap; at least 2")
        for phase, limit_s in {"cell": self.timeouts.cell_s, **self.timeouts.of_phases()}.items():
            if not 0 < limit_s < math.inf:
                raise ConfigError(f"timeouts.{phase}_s={limit_s}: must be a number of seconds, more than 0")
        if self.retry not in (0, 1):
            raise ConfigError(f"retry={self.retry}: must be 0 or 1")
        for key, size in (
            ("storage.keep_free_bytes", self.storage.keep_free_bytes),
            ("storage.needs_bytes", self.storage.needs_bytes or 0),
        ):
            if size < 0:
                raise ConfigError(f"{key}={size}: must be at least 0 bytes")
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
