"""The groups of `conf/`, one dataclass each, and the values of their switches.

Hydra merges every YAML file and every override into these classes, so an unknown key or a wrong
type is refused before anything starts. They are not frozen, because OmegaConf marks a node made
from a frozen dataclass read-only and then refuses to merge the YAML into it.
"""

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from omegaconf import MISSING

from dcpbench.config.mesh import Dimension, mesh_sizes
from dcpbench.core.cell_key import HOW_RUN

HELP, LEAST = "help", "least"
"""In a field's metadata: what it is; the least value that it can have."""


def key(default: Any, help: str = "", least: int | None = None, *, how_run: bool = False) -> Any:
    """A field with what `dcpbench run --help` prints of it and the least value that it can have.

    One that only says how a cell is run is left out of its identity. A default that is a class is called.
    """
    said = {HELP: help, LEAST: least, HOW_RUN: how_run}
    if isinstance(default, type):
        return field(default_factory=default, metadata=said)
    return field(default=default, metadata=said)


def how_run(default: Any, help: str = "", least: int | None = None) -> Any:
    """A field that says how a cell is run: `dcpbench.core.cell_key` leaves it out of a cell's identity."""
    return key(default, help, least, how_run=True)


# The values of keys that have few, which `Config` describes.
Device = StrEnum("Device", "auto cpu cuda")
Matrix = StrEnum("Matrix", "product pairwise")
CompileScope = StrEnum("CompileScope", "model layer")
ActivationCheckpointing = StrEnum("ActivationCheckpointing", "layer compiled_layer")
KeepCheckpoints = StrEnum("KeepCheckpoints", "none failed all")
OptimizerStateAs = StrEnum("OptimizerStateAs", "plain")
Rerun = StrEnum("Rerun", "none failed")
PlanAs = StrEnum("PlanAs", "auto blocks cells json")
Isolation = StrEnum("Isolation", "warm fresh")
Place = StrEnum("Place", "restored live staged written both training")
"""Where a fault is planted."""

Sharing = StrEnum("Sharing", "none disjoint correctness")
Verify = StrEnum("Verify", "standard deep")
Tolerance = StrEnum("Tolerance", "strict standard")

Ending = StrEnum("Ending", "report crash")
"""How a stage of a cell is expected to end: every rank reports, or a rank dies."""

StageWorld = StrEnum("StageWorld", "save load alone")
"""Whose ranks and parallelism a stage of a cell has: those that save, or those that load; `alone` is one rank
on the CPU, without a process group."""


@dataclass
class Only:
    """Values of an axis: those that a scenario or a fault makes sense with, and why with no others; or those
    that a parallelism refuses, and why."""

    values: list[str] = MISSING
    because: str = MISSING


@dataclass
class StageConfig:
    """One stage of a cell: `target(cell, **options)` on every rank of a world of its own.

    `world` says which ranks and which parallelism it has; `environment` is set in its processes before they
    start anything. What a stage leaves for the next one lies on disk.
    """

    target: str = MISSING
    world: StageWorld = StageWorld.save
    environment: dict[str, str] = field(default_factory=dict)
    ends: Ending = Ending.report


@dataclass
class ScenarioConfig:
    """What a cell does: `target(cell, **options)` with a `dcpbench.cell.cell.Cell`, or several `stages`
    one after the other, each with the same options.

    `only` limits axes of the configuration: a cell with another value is a skip. `converts` says that
    it loads under `load_parallel` on `load_world_size` ranks. Without a `process_group` it runs in one
    process that has none.
    """

    name: str = MISSING
    target: str | None = None
    stages: list[StageConfig] = field(default_factory=list)
    only: dict[str, Only] = how_run(dict)
    converts: bool = False
    process_group: bool = True
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def all_stages(self) -> list[StageConfig]:
        """Its stages; `target` is short for the only one."""
        return self.stages or [StageConfig(target=self.target or "")]


@dataclass
class Group:
    """What a YAML file stands for: `target` is the dotted path of a function or class, resolved in the rank
    processes only, so that the driver needs no torch; `options` are more keyword arguments for it.

    By axis, `only` has the values that it can be used with, `refuses` those that it cannot; `packages` are
    the optional packages that it needs. Other cells are skipped.
    """

    name: str = MISSING
    target: str = MISSING
    options: dict[str, Any] = field(default_factory=dict)
    only: dict[str, Only] = how_run(dict)
    refuses: dict[str, Only] = how_run(dict)
    packages: list[str] = how_run(list)


@dataclass
class ExecutorConfig(Group):
    """Where ranks live and what starts them: `target(config)` is a `dcpbench.executors.base.Engine`, resolved
    in the driver.

    `address` is that of what runs already, null starts something for this sweep alone. `ranks_per_host` is
    the most ranks of a cell that a host has; null: as many as its GPUs need, on the CPU as many as there are.
    Cells run on exactly `hosts` hosts, or on as many as they have ranks; a Ray cluster is waited for until it
    has that many. null: the hosts of the cluster are used as they are. Only these two are part of a cell.
    """

    name: str = how_run(MISSING)
    target: str = how_run(MISSING)
    options: dict[str, Any] = how_run(dict)
    address: str | None = how_run(None)
    ranks_per_host: int | None = key(None, least=1)
    hosts: int | None = key(None, least=1)


@dataclass
class ParallelConfig(Group):
    """How a model is spread over the ranks: `target(model, mesh, config)` returns the wrapped model.

    `mesh` names the dimensions that this parallelism has, outermost first, out of those
    whose sizes follow, of which one may be `REST`; a `dp_replicate` of null is what `replicated_on` makes of
    it. An empty `mesh` means an unwrapped replica on every rank.
    An empty `tp_plan` is the model's, with `sequence_parallel` its `sp_plan`, and an empty `ep_plan` too. A
    pipeline, one with `pp`, runs `pp_schedule` over `pp_microbatches` parts of each rank's batch.
    `compile_scope` is what is compiled by itself where the cell does not say. Without `foreach` optimizers
    take one parameter at a time, unless they are told how. `gloo`: gloo can carry its collectives on GPUs.
    """

    mesh: list[str] = field(default_factory=list)
    pp: int = 1
    dp_replicate: int | None = 1
    dp_shard: int = 1
    ep: int = 1
    tp: int = 1
    tp_plan: dict[str, str] = field(default_factory=dict)
    ep_plan: list[str] = field(default_factory=list)
    sequence_parallel: bool = how_run(False)
    pp_schedule: str = "1F1B"
    pp_microbatches: int = 2
    compile_scope: CompileScope = CompileScope.model
    foreach: bool = True
    gloo: bool = how_run(False)

    def replicated_on(self, hosts: int) -> "ParallelConfig":
        """With as many replicas as hosts, if it does not say how many: then what is sharded, whose ranks are
        neighbours, is so within a host. On one host they are two."""
        return self if self.dp_replicate is not None else replace(self, dp_replicate=max(hosts, 2))

    def planned_by(self, model: "ModelConfig") -> "ParallelConfig":
        """Fill in the plans that it needs and does not have with those of a model."""
        tp_plan = model.sp_plan if self.sequence_parallel else model.tp_plan
        return replace(
            self,
            tp_plan=self.tp_plan or (tp_plan if Dimension.tp in self.mesh else {}),
            ep_plan=self.ep_plan or (model.ep_plan if Dimension.ep in self.mesh else []),
        )

    def mesh_sizes(self, world_size: int) -> dict[str, int]:
        """The size of each mesh dimension on `world_size` ranks, outermost first.

        Raises:
            ConfigError: the sizes are not positive, name a dimension that the mesh does not have, or do not
                multiply to the world size.
        """
        decided = self.replicated_on(1)
        given = {name.value: int(getattr(decided, name)) for name in Dimension}
        return mesh_sizes(self.name, self.mesh, given, world_size)


@dataclass
class ModelConfig(Group):
    """A model: `target(**options)`, whose `input_size` and `output_size` shape its batches.

    `batch_size` is the global batch; every data-parallel rank sees an equal share of it. `tp_plan`
    says which modules tensor parallelism shards, and how: colwise or rowwise; `sp_plan` where what lies
    between them is sequence parallel. `ep_plan` names the modules that are experts, as
    `dcpbench.workloads.models.Experts`. The forward pass of one that is `sequential` calls the model's
    children one after the other, so that a stage of a pipeline can have some of them. One that
    `requires_accelerator` is too large for ranks that share a CPU and its memory.
    """

    batch_size: int = key(24, least=1)
    requires_accelerator: bool = False
    tp_plan: dict[str, str] = field(default_factory=dict)
    sp_plan: dict[str, str] = field(default_factory=dict)
    ep_plan: list[str] = field(default_factory=list)
    sequential: bool = False


@dataclass
class WorkloadConfig:
    """What is trained, if it is not a model of the group `model` by an optimizer of the group `optimizer`:
    `target(**options)` returns a `dcpbench.workloads.workload.Workload`; with `checkpointer=trainer`
    `target(setup, **options)` returns a trainer, see `dcpbench.workloads.own_trainer`."""

    target: str | None = key(
        None,
        "a function that returns a dcpbench.workloads.workload.Workload, with checkpointer=trainer a "
        "trainer; null: the groups model and optimizer",
    )
    options: dict[str, Any] = key(dict, "keyword arguments for it")


@dataclass
class OptimizerConfig(Group):
    """An optimizer: `target(groups(model), lr=..., ...)`; what is null is left to its default."""

    groups: str = "dcpbench.workloads.models.one_group"
    lr: float | None = MISSING
    weight_decay: float | None = None
    momentum: float | None = None
    betas: list[float] | None = None

    def hyperparameters(self) -> dict[str, Any]:
        """Keyword arguments for the optimizer's constructor."""
        betas = None if self.betas is None else tuple(self.betas)
        given = {"lr": self.lr, "weight_decay": self.weight_decay, "momentum": self.momentum, "betas": betas}
        return {name: value for name, value in given.items() if value is not None} | self.options


@dataclass
class SchedulerConfig(Group):
    """A scheduler of learning rates: `target(optimizer, **options)`."""


@dataclass
class ComponentConfig(Group):
    """What a run trains with beside model, optimizer and scheduler, and saves: `target(surroundings,
    **options)` returns a `dcpbench.workloads.components.Component`."""


@dataclass
class LoadIntoConfig:
    """What a checkpoint is loaded into, where that is not what trainers should have: a run whose scheduler is
    there and whose optimizer has state (`filled`), if only zeros, and that has no gradients.

    With `gradients` it has those of a step that was not taken. Without `scheduler` that is made once the
    optimizer is loaded, and loaded itself then.
    """

    name: str = MISSING
    filled: bool = True
    gradients: bool = False
    scheduler: bool = True


@dataclass
class CheckpointerConfig(Group):
    """What writes and reads checkpoints: `target(folder, config, ranks)` returns a
    `dcpbench.checkpointers.base.Checkpointer`, given the cell's folder for checkpoints, its `Config` and the
    ranks."""


@dataclass
class StorageConfig(Group):
    """Where checkpoints lie: `target(folder, config, save)` returns a
    `dcpbench.checkpointers.storage.Storage`.

    `root` is a folder for checkpoints outside the sweep's own; null keeps them in the cell's folder.
    A cell is skipped where it would leave less than `keep_free_bytes` free. `needs_bytes` is what it
    writes; null takes what cells like it took up.
    """

    root: str | None = how_run(None)
    thread_count: int = key(1, least=1)
    sync_files: bool = True
    keep_free_bytes: int = how_run(2**30, least=0)
    needs_bytes: int | None = how_run(None, least=0)

    @property
    def url(self) -> str:
        """What comes before the path of a checkpoint that lies in no folder; empty where it lies in one."""
        return str(self.options.get("url") or "")


@dataclass
class Expect:
    """One way in which a planted fault may be seen; what is null may be anything.

    By a check: `check` fails, and its first finding is on `rank`, has this `problem` and a `name` that this
    regular expression matches whole. A negative `rank` counts from the last one: -2 is the last but one, or
    the only one. By a loader that refuses: in one of `phases` a rank raises an exception of class `error`, in
    whose text the regular expression `message` is found.
    """

    check: str | None = None
    name: str | None = None
    rank: int | None = None
    problem: str | None = None
    phases: list[str] = field(default_factory=list)
    error: str | None = None
    message: str | None = None


def rank_of(rank: int, world_size: int) -> int:
    """Which rank that is in a world of this size: a negative one counts from the last; the first or the last
    one where there are not so many."""
    return max(world_size + rank, 0) if rank < 0 else min(rank, world_size - 1)


@dataclass
class FaultConfig:
    """A defect planted on purpose by `target`, null for none, and by what it has to be seen.

    `at` says where: after a load in what was `restored`, in the `live` state right after a save, in
    what is `staged` to be saved, in the files that were `written`, in `both` what is staged and what is
    restored, or in the `training` of every parallel run of the cell. On all ranks, or `on_one_rank`, which
    `rank_of` says. A cell has to write `saves` checkpoints,
    where it is about an earlier one.
    """

    name: str = MISSING
    target: str | None = None
    at: Place = Place.restored
    on_one_rank: bool = how_run(False)
    rank: int = how_run(-2)
    saves: int = how_run(1)
    expects: list[Expect] = how_run(list)
    only: dict[str, Only] = how_run(dict)
    options: dict[str, Any] = field(default_factory=dict)
