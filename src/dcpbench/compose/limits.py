"""All limits that are known before a cell runs: they refuse the sweep, or skip the cell.

A value that no machine could run stops the sweep before it starts, for the user to fix. A combination that
this machine cannot run is a `skip`. The least value of a key is declared with the key; the values that a
group value can be used with (`only`, `refuses`) are declared in its file.
"""

import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import Field, fields, is_dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

from omegaconf import MISSING

from dcpbench.config.errors import ConfigError, too_small, value_text
from dcpbench.config.groups import (
    ActivationCheckpointing,
    Device,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    StageWorld,
)
from dcpbench.config.keys import LEAST
from dcpbench.config.mesh import dp_degree
from dcpbench.config.schema import SEED_STRIDE, Config
from dcpbench.config.text import as_target, counted, is_dotted
from dcpbench.core.axes import AXES
from dcpbench.executors import shared_gpus
from dcpbench.executors.machine import Machine
from dcpbench.rank.messages import Backend

if TYPE_CHECKING:
    from dcpbench.executors.interpreters import Versions

RANKS_BY_DEFAULT = 4

_SECRET = {"key", "secret", "token", "username", "password", "client_kwargs", "config_kwargs", "session"}
"""Options of a file system that are or can contain credentials."""


def one_host(ranks: int, device: str) -> int:
    """Return how many hosts run a number of ranks, where there are no others."""
    return 1


def resolve(config: Config, machine: Machine, hosts_of: Callable[[int, str], int] = one_host) -> Config:
    """Decide the device, the world size and the number of hosts (null for one) of a configuration. A user's
    workload replaces model and optimizer.

    Raises:
        ConfigError: it needs GPUs or a second interpreter, and there are none.
    """
    if config.load_python and not machine.has_interpreters:
        needs = "needs executor=local; other executors have one interpreter"
        raise ConfigError(f"load_python={config.load_python}: {needs}")
    gpus = machine.gpus
    device = config.device
    if device is Device.auto:
        device = Device.cuda if gpus else Device.cpu
    if device is Device.cuda and not gpus:
        raise ConfigError("device=cuda: this machine has no GPU that torch can use; use device=cpu")
    world_size = config.world_size
    if world_size == "auto":
        # Two or three GPUs have one rank each; a single GPU has all ranks.
        world_size = min(RANKS_BY_DEFAULT, gpus) if gpus > 1 and device is Device.cuda else RANKS_BY_DEFAULT
        if not config.scenario.process_group:
            world_size = 1

    target = config.workload.target
    model = ModelConfig(target, target) if target else config.model

    def on_hosts(parallel: ParallelConfig, ranks: int) -> ParallelConfig:
        hosts = hosts_of(ranks, device.value)
        replicated = parallel.replicated_on(hosts if hosts < ranks else 1)  # else nothing is sharded
        return replicated.planned_by(model)

    asked_hosts = min(config.executor.hosts or 1, max(int(world_size), config.load_world_size or 1))
    decided = replace(
        config,
        device=device,
        world_size=int(world_size),
        parallel=on_hosts(config.parallel, int(world_size)),
        load_parallel=config.load_parallel
        and on_hosts(config.load_parallel, config.load_world_size or int(world_size)),
        executor=replace(config.executor, hosts=asked_hosts if asked_hosts > 1 else None),
    )
    if not config.own_trainer:
        before, after = config.steps_before_save, config.steps_after_load
        decided = replace(decided, train_steps=before, resume_steps=after)
    if target is None:
        return decided
    return replace(decided, model=model, optimizer=OptimizerConfig(target, target, lr=None))


def cpp_compiler() -> str:
    """Return the compiler that torch.compile calls for the CPU."""
    return os.environ.get("CXX", "g++")


def has_several_sizes(configs: Iterable[Config]) -> bool:
    """Return whether the cells of a sweep have several world sizes; then meshes and batches need not fit
    all."""
    return len({(str(config.world_size), config.load_world_size) for config in configs}) > 1


class Limit(NamedTuple):
    """Why a cell cannot run: it is skipped, or `refuses` the sweep if all its cells have one world size."""

    reason: str
    refuses: bool = False


def refuse_impossible(config: Config) -> None:
    """Refuse values that no machine could run.

    Raises:
        ConfigError: the message names the key, its value and the values that are allowed.
    """
    for reason in _wrong_values(config):
        raise ConfigError(reason)


def why_skip(
    asked: Config,
    resolved: Config,
    machine: Machine,
    several_sizes: bool = False,
    overrides: Sequence[str] = (),
) -> str | None:
    """Return why a cell makes no sense or this machine cannot run it, or None if it can.

    Args:
        several_sizes: the result of `has_several_sizes` for the sweep.
        overrides: the cell's overrides.

    Raises:
        ConfigError: a mesh or the batch does not fit the world size.
    """
    limit = next(_limits_of_cells(asked, resolved, machine, overrides), None)
    if limit and limit.refuses and not several_sizes:
        raise ConfigError(limit.reason)
    return limit.reason if limit else None


def _wrong_values(config: Config) -> Iterator[str]:
    """Yield a sentence for each value that no machine could run."""
    for key, config_field, value in keys_below(config):
        least = config_field.metadata.get(LEAST)
        if least is not None and value is not None and value < least:
            yield too_small(key, value, least)
        if isinstance(value, list) and any(isinstance(inside, list | dict) for inside in value):
            yield f"{key}={value_text(value)}: has a list or a mapping in its list; write {key}=[a,b]"
    # The seeds that torch's generators accept, for the batch of each step.
    low, high = -(2**63) // SEED_STRIDE + 1, (2**64 - 1 - config.last_step) // SEED_STRIDE
    if not low <= config.seed <= high:
        yield f"seed={config.seed}: must be between {low} and {high}"
    for key, config_field, value in keys_below(config):
        if config_field.name == "target" and value not in (None, MISSING) and not is_dotted(value):
            yield f"{key}={value}: must be a dotted name, such as {as_target(value) or 'mine.build'}"
    if config.own_trainer and config.workload.target is None:
        trainer = "workload.target=null; must be a function that builds the trainer"
        yield f"checkpointer={config.checkpointer.name}: {trainer}"
    if config.overlap_saves and len(config.save_steps) < 2:
        yield f"overlap_saves=true: saves={config.saves} leaves nothing to overlap; at least 2"
    if config.known_failures and not os.path.isfile(config.known_failures):  # noqa: PTH113 - any text
        yield f"known_failures={config.known_failures}: there is no such file"
    if "url" in config.storage.options and not config.storage.url:
        yield "storage.options.url=null: must be the place of the objects, as s3://bucket/folder"
    for secret in sorted(_SECRET & config.storage.options.get("file_system", {}).keys()):
        why = "every row shows it; give it to the client by its own variables or files"
        yield f"storage.options.file_system.{secret}: is refused: {why}"
    for phase, limit_s in config.timeouts.by_phase().items():
        if not 0 < limit_s < math.inf:
            yield f"timeouts.{phase}_s={limit_s}: must be a number of seconds, more than 0"
    if config.retry not in (0, 1):
        yield f"retry={config.retry}: must be 0 or 1"
    if config.world_size != "auto" and (isinstance(config.world_size, str) or config.world_size < 1):
        yield f"world_size={config.world_size}: must be auto, or at least 1"


def keys_below(config: Any, above: str = "") -> "Iterator[tuple[str, Field[Any], Any]]":
    """Yield each key, its field and its value, and those of the keys below it."""
    for config_field in fields(config):
        value = getattr(config, config_field.name)
        yield f"{above}{config_field.name}", config_field, value
        if is_dataclass(value):
            yield from keys_below(value, f"{above}{config_field.name}.")


def _limits_of_cells(
    asked: Config, config: Config, machine: Machine, overrides: Sequence[str]
) -> Iterator[Limit]:
    """Yield the limits of combinations, and of this machine, that a cell exceeds; the first one decides. What
    only a rank can find out raises a `Skip` there."""
    scenario, named = config.scenario, f"scenario={config.scenario.name}"
    for word in overrides if config.workload.target else ():
        group = word.lstrip("+~").partition("=")[0].partition(".")[0]
        if group in ("model", "optimizer", "scheduler"):
            yield Limit(f"{word}: workload.target={config.workload.target} has its own {group}")
    for group in AXES:
        limited = getattr(config, group)
        for axis, only in getattr(limited, "only", {}).items():
            if (chosen := config.value_of(axis)) not in only.values:
                may_be = f"{axis}={', '.join(only.values)} and" if only.values else f"no {axis},"
                yield Limit(f"{group}={limited.name} takes {may_be} not {chosen}: {only.because}")
        for axis, refused in getattr(limited, "refuses", {}).items():
            if (chosen := config.value_of(axis)) in refused.values:
                yield Limit(f"{group}={limited.name} does not take {axis}={chosen}: {refused.because}")
        for package in getattr(limited, "packages", ()):
            if not find_spec(package):
                yield Limit(f"{group}={limited.name} needs the package {package}, which is not installed")
    recomputed = config.activation_checkpointing
    if recomputed is ActivationCheckpointing.compiled_layer and not config.compiles_layers:
        none = "no layer is compiled separately (compile_scope=layer)"
        yield Limit(f"activation_checkpointing={recomputed}: {none}")
    if config.fault.saves > len(config.save_steps):
        about = f"it needs an earlier checkpoint, and saves={config.saves}"
        yield Limit(f"fault={config.fault.name}: {about}")
    if not scenario.process_group and config.world_size != 1:
        alone = "one process without a process group"
        yield Limit(f"{named} is {alone}, not world_size={config.world_size}")
    if config.overlap_saves and not config.save.asynchronous:
        saves = f"with save={config.save.name} each save is complete"
        yield Limit(f"overlap_saves=true: {saves} before training continues")
    if config.load_parallel and not scenario.converts:
        loads = f"{named} loads under the parallelism that it saved with"
        yield Limit(f"load_parallel={config.load_parallel.name}: {loads}")
    if config.load_world_size and not scenario.converts:
        loads = f"{named} loads on the ranks that it saved with"
        yield Limit(f"load_world_size={config.load_world_size}: {loads}")
    if config.load_python and not any(config.python_of(first.world) for first, *_ in config.processes):
        loads = f"{named} loads under the Python that saved; scenario=convert does not"
        yield Limit(f"load_python={config.load_python}: {loads}")
    if config.device is Device.cuda:
        yield from _limits_of_shared_gpus(config, machine)
    for world in (StageWorld.save, StageWorld.load):
        yield from _limits_of_ranks(asked, config, world)
    if config.device is not Device.cpu:
        return
    if config.save.requires_accelerator:
        why = "keeps its staging buffers in pinned memory, which needs an accelerator"
        yield Limit(f"save={config.save.name} {why}")
    if config.model.requires_accelerator:
        why = "is for accelerators (model.requires_accelerator=false runs it on the CPU anyway)"
        yield Limit(f"model={config.model.name} {why}")
    if config.compile and not shutil.which(cpp_compiler()):
        needs = f"needs a C++ compiler, and {cpp_compiler()} was not found (or set CXX)"
        yield Limit(f"compile=true on the CPU {needs}")


def loading_versions(config: Config) -> "Versions | None":
    """Return the versions that `load_python` has; None if it is not set."""
    if not config.load_python:
        return None
    from dcpbench.executors import interpreters  # few cells need it

    return interpreters.versions_of(config.load_python)


def backend_of(config: Config, machine: Machine) -> Backend:
    """Return what carries collectives: NCCL on GPUs, but gloo where several ranks share one and their NCCL
    cannot do that, and on the CPU."""
    if config.device is not Device.cuda:
        return Backend.gloo
    shared = shared_gpus.ranks_per_gpu(config.most_ranks, machine.gpus) > 1
    return Backend.gloo if shared and not shared_gpus.nccl_can_share(_nccl(config, machine)) else Backend.nccl


def _nccl(config: Config, machine: Machine) -> str | None:
    """Return the version of NCCL that ranks use, or the one of `load_python` if that cannot share GPUs."""
    if (loads := loading_versions(config)) and not shared_gpus.nccl_can_share(loads.nccl):
        return loads.nccl
    return machine.nccl


def _limits_of_shared_gpus(config: Config, machine: Machine) -> Iterator[Limit]:
    """Yield the limits of ranks that share GPUs, if there are fewer GPUs than ranks."""
    ranks, gpus = config.most_ranks, machine.gpus
    per_gpu = shared_gpus.ranks_per_gpu(ranks, gpus)
    if config.ranks_per_gpu and per_gpu > config.ranks_per_gpu:
        needs = f"{counted(ranks, 'rank')} on {counted(gpus, 'GPU')} need {per_gpu}"
        yield Limit(f"ranks_per_gpu={config.ranks_per_gpu}: {needs}")
    carried_by_gloo = config.parallel.gloo and config.loading.gloo and not config.state_dict.full_state_dict
    if backend_of(config, machine) is Backend.gloo and not carried_by_gloo:
        cannot = f"{counted(ranks, 'rank')} cannot share {counted(gpus, 'GPU')}"
        install = shared_gpus.how_to_get(machine.description.get("cuda"))
        yield Limit(f"{cannot} under NCCL {_nccl(config, machine)}: {install}")


def _limits_of_ranks(asked: Config, config: Config, world: StageWorld) -> Iterator[Limit]:
    """Yield the limits of spreading a model and its batch over the ranks that save, or that load."""
    parallel, world_size = config.world_of(world)
    try:
        degree = dp_degree(parallel.mesh_sizes(world_size))
    except ConfigError as error:
        if world is StageWorld.load and config.load_world_size:
            yield Limit(f"{error} (load_world_size)")
        elif asked.world_size == "auto" and world_size < RANKS_BY_DEFAULT:
            yield Limit(f"{error} (all that this machine has)")
        else:
            yield Limit(str(error), refuses=True)
        return
    if not config.workload.target and config.model.batch_size % degree:
        wrong = f"model.batch_size={config.model.batch_size}"
        share = f"does not divide over {degree} data-parallel ranks"
        yield Limit(f"{wrong}: {share}", refuses=True)
    both = f"parallel={parallel.name}: model={config.model.name}"
    if "pp" in parallel.mesh and not config.model.sequential:
        yield Limit(f"{both} cannot be cut into stages (model.sequential)")
    if "ep" in parallel.mesh and not parallel.ep_plan:
        yield Limit(f"{both} has no experts (parallel.ep_plan)")
    # Whether a user's workload has a plan, only ranks find out.
    if "tp" in parallel.mesh and not (parallel.tp_plan or config.workload.target):
        yield Limit(f"{both} has no tp_plan to shard it by, as +parallel.tp_plan={{my_layer:colwise}}")
