"""Queries of the layout of a cell, and runs of it."""

from dcpbench.cell.cell import Cell
from dcpbench.config.schema import Config
from dcpbench.runs import build_run
from dcpbench.runs.own_run import OwnRun

_FSDP1 = "dcpbench.workloads.parallelisms.fsdp"


def fsdp1_sizes(config: Config) -> dict[str, int]:
    """Return the sizes of the mesh under FSDP1; empty under another parallelism, or for a user's trainer."""
    subject = config.parallel.target == _FSDP1 and not config.own_trainer
    return config.parallel.mesh_sizes(int(config.world_size)) if subject else {}


def fsdp1_of_user(config: Config) -> bool:
    """Return whether FSDP1 shards a user's model."""
    return bool(fsdp1_sizes(config) and config.workload.target)


def has_tensor_parallel_fsdp1(config: Config) -> bool:
    """Return whether FSDP1 shards tensors that are sharded by tensor parallelism."""
    return fsdp1_sizes(config).get("tp", 1) > 1


def never_averages(config: Config) -> bool:
    """Return whether FSDP1 has several replicas of one shard, which it never averages."""
    sizes = fsdp1_sizes(config)
    return sizes.get("dp_replicate", 1) > 1 and sizes.get("dp_shard") == 1


def runs_own_loop(config: Config) -> bool:
    """Return whether dcpbench trains, and not a user's trainer."""
    return not config.own_trainer


def has_bf16_model(config: Config) -> bool:
    """Return whether the parameters are in bfloat16."""
    return bool(config.model.name == "bf16")


def gathers_state_dicts(config: Config) -> bool:
    """Return whether state dicts are full."""
    return bool(config.state_dict.full_state_dict)


def loads_by_dcp(config: Config) -> bool:
    """Return whether DCP saves and loads what dcpbench gives it."""
    return bool(config.checkpointer.name == "dcp" and not config.own_trainer)


def may_load_one_replica(config: Config) -> bool:
    """Return whether ranks can load what one of several replicas has: separate ones, or tensors that not all
    ranks shard."""
    shards_all = bool(fsdp1_sizes(config))  # also one that fits on this rank whole
    return never_averages(config) or (loads_by_dcp(config) and not shards_all)


def loads_alone(config: Config) -> bool:
    """Return whether each rank loads with its own metadata."""
    return not config.save.uses_collectives


def new_target(cell: Cell) -> OwnRun:
    """Build a load target."""
    return build_run.build(cell.config, cell.world, cell.config.seed + 1)
