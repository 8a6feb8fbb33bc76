"""The groups of `conf/`, a dataclass each, and the values of keys that have few.

Hydra merges every YAML file and every override into these classes, so an unknown key or a wrong type is
refused before anything starts. They are not frozen: OmegaConf would mark their nodes read-only and could not
merge.
"""

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from dcpbench.config.keys import MISSING, how_run, key
from dcpbench.config.mesh import Dimension, mesh_sizes

Device = StrEnum("Device", "auto cpu cuda")
Matrix = StrEnum("Matrix", "product pairwise")
CompileScope = StrEnum("CompileScope", "model layer")
ActivationCheckpointing = StrEnum("ActivationCheckpointing", "layer compiled_layer")
KeepCheckpoints = StrEnum("KeepCheckpoints", "none failed all")
Isolation = StrEnum("Isolation", "warm fresh")
Sharing = StrEnum("Sharing", "none disjoint correctness")
Verify = StrEnum("Verify", "standard deep")
Tolerance = StrEnum("Tolerance", "strict standard")

InjectedAt = StrEnum("InjectedAt", "restored live staged written both training")
"""The place of an injected fault: the state after a load, the live state after a save, the state staged for
a save, the files of a save, both staged and restored state, the training of every parallel run."""

Ending = StrEnum("Ending", "report crash")
"""The expected end of a stage: every rank reports, or a rank dies."""

StageWorld = StrEnum("StageWorld", "save load alone")
"""The ranks and parallelism of a stage: those that save, those that load, or one rank on the CPU without a
process group."""

Kept = StrEnum("Kept", "kept new none")
"""The object that saves get: one for all saves that do not overlap, a new one for each, or none, so that DCP
makes its own."""

Uploader = StrEnum("Uploader", "thread process")
"""DCP's `AsyncCheckpointerType`."""


@dataclass
class Only:
    """Values of an axis that are allowed, or refused, and the reason."""

    values: list[str] = MISSING
    because: str = MISSING


@dataclass
class StageConfig:
    """A stage of a cell: `target(cell, **options)`, called on every rank in new processes, whose
    `environment` is set before they start. Such stages exchange files only.

    One that `continues` is `target(cell, reference, **options)` with what the stage before has returned. It
    runs in the processes of that one if it has the same `world`, unless what loads is a new process: then one
    that is `restarted` runs under a second interpreter. One `of_each_save` runs as often as the cell saves.
    """

    target: str = MISSING
    world: StageWorld = StageWorld.save
    continues: bool = how_run(False)
    restarted: bool = how_run(False)
    of_each_save: bool = how_run(False)
    environment: dict[str, str] = field(default_factory=dict)
    ends: Ending = Ending.report


@dataclass
class ScenarioConfig:
    """The code of a cell: `target(cell, **options)` with a `dcpbench.cell.cell.Cell`, or several `stages` in
    order, each with the same options.

    Cells with another value than `only` allows are skipped. A scenario that `converts` loads under
    `load_parallel` on `load_world_size` ranks. Without `process_group` it runs in one process that has none.
    """

    name: str = MISSING
    target: str | None = None
    stages: list[StageConfig] = field(default_factory=list)
    only: dict[str, Only] = how_run(dict)
    converts: bool = False
    process_group: bool = True
    options: dict[str, Any] = field(default_factory=dict)

    def processes(self, restarts: bool = False, saves: int = 1) -> list[list[StageConfig]]:
        """Return the stages that run in the same processes, in order; `target` is short for a single stage.

        Args:
            restarts: what loads is another process than what has saved.
            saves: as often a stage `of_each_save` runs; every second time under the second interpreter.
        """
        stages_of_processes: list[list[StageConfig]] = []
        for stage in self.stages or [StageConfig(target=self.target or "")]:
            for number in range(saves if stage.of_each_save else 1):
                repeated = replace(stage, restarted=restarts and stage.restarted and number % 2 == 0)
                if (
                    stages_of_processes
                    and stage.continues
                    and not restarts
                    and stage.world is stages_of_processes[-1][0].world
                ):
                    stages_of_processes[-1].append(repeated)
                else:
                    stages_of_processes.append([repeated])
        return stages_of_processes


@dataclass
class Group:
    """A YAML file of a group. `target` is the dotted path of a function or class, imported by ranks alone,
    because the driver has no torch; `options` are further keyword arguments for it.

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
    """Where ranks run and what starts them: `target(config)` is a `dcpbench.executors.base.Engine` in the
    driver.

    `address` is the address of a running cluster; null starts one for this sweep. A host has at most
    `ranks_per_host` ranks of a cell; null: as many as its GPUs need, on the CPU all of them. Cells run on
    exactly `hosts` hosts, and a Ray cluster is waited for until it has them; null: on its hosts as they are.
    Only these two are part of a cell's identity.
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

    `mesh` names its dimensions, outermost first. Their sizes follow; one can be `REST`, and a `dp_replicate`
    of null depends on the hosts, see `replicated_on`. Without a mesh every rank has an unwrapped replica. An
    empty `tp_plan` is the model's (with `sequence_parallel` its `sp_plan`), an empty `ep_plan` too. With `pp`
    in the mesh a pipeline runs `pp_schedule` over `pp_microbatches` parts of each rank's batch.
    `compile_scope` is the default scope of compilation: the model, or each layer. Without `foreach`
    optimizers update one parameter at a time by default. `gloo`: gloo can carry its collectives on GPUs.
    """

    mesh: list[str] = field(default_factory=list)
    pp: int = 1
    dp_replicate: int | None = 1
    dp_shard: int = 1
    ep: int = 1
    tp: int = 1
    tp_plan: dict[Any, str] = field(default_factory=dict)
    ep_plan: list[str] = field(default_factory=list)
    sequence_parallel: bool = how_run(False)
    pp_schedule: str = "1F1B"
    pp_microbatches: int = 2
    compile_scope: CompileScope = CompileScope.model
    foreach: bool = True
    gloo: bool = how_run(False)

    def __post_init__(self) -> None:
        self.tp_plan = {str(name): style for name, style in self.tp_plan.items()}  # of a Sequential, numbers

    def replicated_on(self, hosts: int) -> "ParallelConfig":
        """Fill in a `dp_replicate` of null: one replica a host, so that shards stay within a host; at least
        two."""
        return self if self.dp_replicate is not None else replace(self, dp_replicate=max(hosts, 2))

    def planned_by(self, model: "ModelConfig") -> "ParallelConfig":
        """Fill in the plans that its mesh needs and it does not have with the model's."""
        tp_plan = model.sp_plan if self.sequence_parallel else model.tp_plan
        return replace(
            self,
            tp_plan=self.tp_plan or (tp_plan if Dimension.tp in self.mesh else {}),
            ep_plan=self.ep_plan or (model.ep_plan if Dimension.ep in self.mesh else []),
        )

    def mesh_sizes(self, world_size: int) -> dict[str, int]:
        """Return the size of each mesh dimension on `world_size` ranks, outermost first.

        Raises:
            ConfigError: a size is wrong, see `dcpbench.config.mesh.mesh_sizes`.
        """
        decided = self.replicated_on(1)
        given = {name.value: int(getattr(decided, name)) for name in Dimension}
        return mesh_sizes(self.name, self.mesh, given, world_size)


@dataclass
class ModelConfig(Group):
    """A model: `target(**options)`, with `input_size` and `output_size`, which shape its batches.

    `batch_size` is that of the global batch, which data-parallel ranks share evenly. `tp_plan` maps modules
    to `colwise` or `rowwise` for tensor parallelism, `sp_plan` with sequence parallelism; `ep_plan` names the
    modules that are experts, as `dcpbench.workloads.models.Experts`. A `sequential` model calls its children
    in order, so that a pipeline can split them. One that `requires_accelerator` is too large for ranks that
    share a CPU.
    """

    batch_size: int = key(24, least=1)
    requires_accelerator: bool = False
    tp_plan: dict[str, str] = field(default_factory=dict)
    sp_plan: dict[str, str] = field(default_factory=dict)
    ep_plan: list[str] = field(default_factory=list)
    sequential: bool = False


@dataclass
class WorkloadConfig:
    """A custom workload, instead of the groups `model` and `optimizer`: `target(**options)` returns a
    `dcpbench.workloads.workload.Workload`; with `checkpointer=trainer` `target(setup, **options)` returns a
    trainer, see `dcpbench.runs.own_trainer`."""

    target: str | None = key(
        None,
        "a function that returns a dcpbench.workloads.workload.Workload, with checkpointer=trainer a "
        "trainer; null: the groups model and optimizer",
    )
    options: dict[str, Any] = key(dict, "keyword arguments for it")


@dataclass
class OptimizerConfig(Group):
    """An optimizer: `target(groups(model), lr=..., ...)`; a hyperparameter of null has the optimizer's
    default."""

    groups: str = "dcpbench.workloads.models.one_group"
    lr: float | None = MISSING
    weight_decay: float | None = None
    momentum: float | None = None
    betas: list[float] | None = None

    def hyperparameters(self) -> dict[str, Any]:
        """Return the keyword arguments for the optimizer's constructor."""
        betas = None if self.betas is None else tuple(self.betas)
        given = {"lr": self.lr, "weight_decay": self.weight_decay, "momentum": self.momentum, "betas": betas}
        return {name: value for name, value in given.items() if value is not None} | self.options


@dataclass
class StateDictConfig:
    """The options of torch's state-dict functions for saves and loads: the fields of its `StateDictOptions`.

    A scenario that freezes parameters sets `ignore_frozen_params` itself.
    """

    name: str = MISSING
    full_state_dict: bool = False
    cpu_offload: bool = False
    broadcast_from_rank0: bool = False
    flatten_optimizer_state_dict: bool = False
    ignore_frozen_params: bool = False
    strict: bool = True

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments for `StateDictOptions`."""
        return {name: value for name, value in vars(self).items() if name != "name"}


@dataclass
class SchedulerConfig(Group):
    """A scheduler of learning rates: `target(optimizer, **options)`."""


@dataclass
class ComponentConfig(Group):
    """A further object that is trained and saved: `target(context, **options)` returns a
    `dcpbench.workloads.components.Component`."""


@dataclass
class LoadIntoConfig:
    """The run that a checkpoint is loaded into, if it is not as trainers should make it: with optimizer
    state (`filled`, if only with zeros), and without gradients.

    With `gradients` it has those of a step that was not taken.
    """

    name: str = MISSING
    filled: bool = True
    gradients: bool = False


@dataclass
class CheckpointerConfig(Group):
    """An implementation of save and load: `target(folder, config, ranks)` returns a
    `dcpbench.checkpointers.base.Checkpointer`, given the cell's folder for checkpoints and its `Config`."""


@dataclass
class StagerConfig:
    """The options of DCP's `DefaultStager`, and which saves get the same one."""

    instance: Kept = Kept.new
    use_pinned_memory: bool = False
    use_shared_memory: bool = False
    use_async_staging: bool = False
    use_non_blocking_copy: bool = False


@dataclass
class PlannerConfig:
    """The options of DCP's `DefaultSavePlanner`, and which saves get the same one."""

    instance: Kept = Kept.new
    dedup_save_to_lowest_rank: bool = False
    enable_plan_caching: bool = False


@dataclass
class SaveConfig(Group):
    """How DCP saves: `target(state_dict, **options)` with the options of `dcp.save`, see
    `dcpbench.checkpointers.dcp`. Other checkpointers use the flags alone.

    An `asynchronous` save lets training continue before the checkpoint is complete. Without a `stager` the
    writer stages, or DCP's default does; without a `planner` DCP makes one.
    """

    asynchronous: bool = False
    cache_staged_state_dict: bool = False
    requires_accelerator: bool = False
    writer: Kept = Kept.kept
    stager: StagerConfig | None = None
    planner: PlannerConfig | None = None
    uploader: Uploader = Uploader.thread

    @property
    def shares_memory(self) -> bool:
        """Whether staged state is in memory that another process can share."""
        return bool(self.stager and self.stager.use_shared_memory)

    @property
    def uses_collectives(self) -> bool:
        """Whether ranks plan together and write one file of metadata; otherwise each rank writes its own."""
        return bool(self.options.get("use_collectives", True))


@dataclass
class StorageConfig(Group):
    """Where checkpoints are stored: `target(folder, config, save)` returns a
    `dcpbench.checkpointers.storage.Storage`.

    `root` is a folder for checkpoints outside the sweep's own; null keeps them in the cell's folder.
    A cell is skipped if it would leave less than `keep_free_bytes` free. `needs_bytes` is how much it
    writes, if that is known.
    """

    root: str | None = how_run(None)
    thread_count: int = key(1, least=1)
    sync_files: bool = True
    keep_free_bytes: int = how_run(2**30, least=0)
    needs_bytes: int | None = how_run(None, least=0)

    @property
    def url(self) -> str:
        """The beginning of a checkpoint's address in a store; empty if checkpoints are folders."""
        return str(self.options.get("url") or "")


@dataclass
class Expect:
    """One way in which an injected fault can be detected; a field that is null allows anything.

    By a check: `check` fails, and its first mismatch is on `rank`, has this `problem`, and its name matches
    the regular expression `name`. A negative `rank` counts from the last one, see `rank_of`. By a loader that
    refuses: in one of `phases` a rank raises an exception of class `error` whose text contains the regular
    expression `message`.
    """

    check: str | None = None
    name: str | None = None
    rank: int | None = None
    problem: str | None = None
    phases: list[str] = field(default_factory=list)
    error: str | None = None
    message: str | None = None


def rank_of(rank: int, world_size: int) -> int:
    """Return a rank of a world; a negative one counts from the last. In a small world it is the first or
    last."""
    return max(world_size + rank, 0) if rank < 0 else min(rank, world_size - 1)


@dataclass
class FaultConfig:
    """A fault that `target` injects, null for none, and how it must be detected.

    It is injected at the place `at`, on one `rank` (see `rank_of`), or on all if that is null. A cell must
    write at least `saves` checkpoints, for a fault of an earlier one.
    """

    name: str = MISSING
    target: str | None = None
    at: InjectedAt = InjectedAt.restored
    rank: int | None = how_run(None)
    saves: int = how_run(1)
    expects: list[Expect] = how_run(list)
    only: dict[str, Only] = how_run(dict)
    options: dict[str, Any] = field(default_factory=dict)
