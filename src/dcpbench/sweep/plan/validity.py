"""What of the product can be run: a configuration error, a skip with its reason, or a cell.

A value that could be run nowhere, or that asks for more than there is, is the user's to mend and
stops the sweep before it starts. A combination that this machine cannot do is a `skip`.
"""

import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import replace

from dcpbench.config.errors import ConfigError
from dcpbench.config.groups import (
    ActivationCheckpointing,
    Device,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    StageWorld,
)
from dcpbench.config.mesh import dp_degree
from dcpbench.config.schema import Config
from dcpbench.executors.fork_server import Machine

RANKS_BY_DEFAULT = 4

_LIMITED = (
    "scenario",
    "fault",
    "checkpointer",
    "save",
    "storage",
    "model",
    "optimizer",
    "scheduler",
    "component",
)
"""The groups whose values may have an `only`."""


def resolve(config: Config, machine: Machine) -> Config:
    """The configuration with its device, its world size and its number of hosts (null for one) decided;
    model and optimizer are what a workload of one's own makes of them, if there is one.

    Raises:
        ConfigError: it asks for GPUs, and there are none.
    """
    gpus = machine.gpus
    device = config.device
    if device is Device.auto:
        device = Device.cuda if gpus else Device.cpu
    if device is Device.cuda and not gpus:
        raise ConfigError("device=cuda: this machine has no GPU that torch can use; device may be cpu")
    world_size = config.world_size
    if world_size == "auto":
        world_size = min(RANKS_BY_DEFAULT, gpus) if device is Device.cuda else RANKS_BY_DEFAULT
        if not config.scenario.process_group:
            world_size = 1

    def on_hosts(parallel: ParallelConfig, ranks: int) -> ParallelConfig:
        hosts = machine.hosts(ranks, device.value)
        replicated = parallel.replicated_on(hosts if hosts < ranks else 1)  # else nothing is sharded
        return replicated.planned_by(config.model)

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
    if not (own := config.workload.target):
        return decided
    return replace(decided, model=ModelConfig(own, own), optimizer=OptimizerConfig(own, own, lr=None))


def cpp_compiler() -> str:
    """What torch.compile calls to compile for the CPU."""
    return os.environ.get("CXX", "g++")


def has_several_sizes(configs: Iterable[Config]) -> bool:
    """Whether cells of a sweep are of several world sizes: then not all of them have to fit the machine, nor
    every mesh and batch each of them."""
    return len({(str(config.world_size), config.load_world_size) for config in configs}) > 1


def why_skip(
    asked: Config,
    resolved: Config,
    machine: Machine,
    several_sizes: bool = False,
    overrides: Sequence[str] = (),
) -> str | None:
    """Why a cell makes no sense or this machine cannot run it, or None if it can.

    Args:
        several_sizes: what `has_several_sizes` says of the sweep.
        overrides: by which the cell is asked for.

    Raises:
        ConfigError: there are fewer GPUs than ranks were asked for, or a mesh or the batch does not fit the
            world size.
    """
    for reason in (
        _without_effect(resolved, overrides),
        _makes_no_sense(resolved),
        _more_ranks_than_gpus(resolved, machine, several_sizes),
        _does_not_fit(asked, resolved, several_sizes),
    ):
        if reason:
            return reason
    if resolved.device is not Device.cpu:
        return None
    if resolved.save.requires_accelerator:
        why = "keeps its staging buffers in pinned memory, which needs an accelerator"
        return f"save={resolved.save.name} {why}"
    if resolved.model.requires_accelerator:
        why = "is for accelerators (model.requires_accelerator=false runs it on the CPU all the same)"
        return f"model={resolved.model.name} {why}"
    if resolved.compile and not shutil.which(cpp_compiler()):
        return (
            f"compile=true on the CPU needs a C++ compiler, and {cpp_compiler()} was not found (or set CXX)"
        )
    return None


def _more_ranks_than_gpus(resolved: Config, machine: Machine, several_sizes: bool) -> str | None:
    asked_for = {"world_size": resolved.world_size, "load_world_size": resolved.load_world_size or 1}
    for key, ranks in asked_for.items():
        if resolved.device is Device.cuda and int(ranks) > machine.gpus:
            text = f"{key}={ranks}: more ranks than GPUs (device=cuda, {machine.gpus} here)"
            if several_sizes:
                return text
            raise ConfigError(text)
    return None


def _does_not_fit(asked: Config, resolved: Config, several_sizes: bool) -> str | None:
    """Why a mesh, or the batch, does not fit the ranks that save or that load, where that is no mistake of
    the user's."""
    for world in (StageWorld.save, StageWorld.load):
        parallel, world_size = resolved.world_of(world)
        try:
            sizes = parallel.mesh_sizes(world_size)
        except ConfigError as error:
            if world is StageWorld.load and resolved.load_world_size:
                return f"{error} (load_world_size)"
            if asked.world_size == "auto" and world_size < RANKS_BY_DEFAULT:
                return f"{error} (all that this machine has)"
            if several_sizes:
                return str(error)
            raise
        degree = dp_degree(sizes)
        if not resolved.workload.target and resolved.model.batch_size % degree:
            wrong = f"model.batch_size={resolved.model.batch_size}"
            text = f"{wrong}: does not divide over {degree} data-parallel ranks"
            if several_sizes:
                return text
            raise ConfigError(text)
        if "pp" in parallel.mesh and not resolved.model.sequential:
            uncut = f"model={resolved.model.name} cannot be cut into stages (model.sequential)"
            return f"parallel={parallel.name}: {uncut}"
        if "ep" in parallel.mesh and not parallel.ep_plan:
            return f"parallel={parallel.name}: model={resolved.model.name} has no experts (parallel.ep_plan)"
        of_another = resolved.workload.target and parallel.tp_plan == asked.model.tp_plan
        if "tp" in parallel.mesh and (not parallel.tp_plan or of_another):
            plan = "no tp_plan to shard it by, as +parallel.tp_plan={my_layer:colwise}"
            return f"parallel={parallel.name}: model={resolved.model.name} has {plan}"
    return None


def _without_effect(config: Config, overrides: Sequence[str]) -> str | None:
    """Why nothing would be what an override asks for: a workload of one's own has its own."""
    for word in overrides if config.workload.target else ():
        group = word.lstrip("+~").partition("=")[0].partition(".")[0]
        if group in ("model", "optimizer", "scheduler"):
            return f"{word}: workload.target={config.workload.target} has its own {group}"
    return None


def _makes_no_sense(config: Config) -> str | None:
    scenario, named = config.scenario, f"scenario={config.scenario.name}"
    for group in _LIMITED:
        limited = getattr(config, group)
        for axis, only in limited.only.items():
            if (value := config.value_of(axis)) not in only.values:
                may_be = f"{axis}={', '.join(only.values)} and" if only.values else f"no {axis},"
                return f"{group}={limited.name} takes {may_be} not {value}: {only.because}"
    for group in ("parallel", "load_parallel"):
        parallel = getattr(config, group)
        for axis, refused in parallel.refuses.items() if parallel else ():
            if (value := config.value_of(axis)) in refused.values:
                return f"{group}={parallel.name} does not take {axis}={value}: {refused.because}"
    if (
        config.activation_checkpointing is ActivationCheckpointing.compiled_layer
        and not config.compiles_layers
    ):
        return "activation_checkpointing=compiled_layer: no layer is compiled by itself (compile_scope=layer)"
    if config.fault.saves > len(config.save_steps):
        return f"fault={config.fault.name}: it is about an earlier checkpoint, and saves={config.saves}"
    if not scenario.process_group and config.world_size != 1:
        return f"{named} is one process without a process group, not world_size={config.world_size}"
    if config.overlap_saves and not config.save.asynchronous:
        saves = f"with save={config.save.name} each save is complete"
        return f"overlap_saves=true: {saves} before training goes on"
    if config.load_parallel and not scenario.converts:
        loads = f"{named} loads under the parallelism that it saved with"
        return f"load_parallel={config.load_parallel.name}: {loads}"
    if config.load_world_size and not scenario.converts:
        return f"load_world_size={config.load_world_size}: {named} loads on the ranks that it saved with"
    if config.load_python and not any(config.python_of(stage.world) for stage in config.stages):
        loads = f"{named} loads in the processes that saved (with verify=deep another one does too)"
        return f"load_python={config.load_python}: {loads}"
    return None
