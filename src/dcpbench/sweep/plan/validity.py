"""What of the product can be run: a configuration error, a skip with its reason, or a cell.

A value that could be run nowhere, or that asks for more than there is, is the user's to mend and
stops the sweep before it starts. A combination that this machine cannot do is a `skip`.
"""

import os
import shutil
from dataclasses import replace

from dcpbench.config.errors import ConfigError
from dcpbench.config.groups import Device
from dcpbench.config.mesh import dp_degree
from dcpbench.config.schema import Config
from dcpbench.executors.machine import Machine

RANKS_BY_DEFAULT = 4


def resolve(config: Config, machine: Machine) -> Config:
    """The configuration with its device and world size decided.

    Raises:
        ConfigError: there are fewer GPUs than the configuration asks for.
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
    if device is Device.cuda and int(world_size) > gpus:
        raise ConfigError(f"world_size={world_size}: more ranks than GPUs (device=cuda, {gpus} here)")
    return replace(config, device=device, world_size=int(world_size))


def why_skip(asked: Config, resolved: Config) -> str | None:
    """Why a cell makes no sense or this machine cannot run it, or None if it can.

    Raises:
        ConfigError: a mesh does not fit the world size, and that is not this machine's doing.
    """
    assert isinstance(resolved.world_size, int)
    if senseless := _makes_no_sense(resolved):
        return senseless
    for parallel in (resolved.parallel, resolved.loading):
        try:
            sizes = parallel.mesh_sizes(resolved.world_size)
        except ConfigError as error:
            if asked.world_size == "auto" and resolved.world_size < RANKS_BY_DEFAULT:
                return f"{error} (all that this machine has)"
            raise
        degree = dp_degree(sizes, resolved.world_size)
        if resolved.model.batch_size % degree:
            raise ConfigError(
                f"model.batch_size={resolved.model.batch_size}: does not divide over {degree} "
                "data-parallel ranks"
            )
        if "tp" in parallel.mesh and not parallel.tp_plan:
            return f"parallel={parallel.name}: model={resolved.model.name} has no tp_plan to shard it by"
    if resolved.save.requires_accelerator and resolved.device is Device.cpu:
        return (
            f"save={resolved.save.name} keeps its staging buffers in pinned memory, which needs an "
            "accelerator"
        )
    if resolved.model.requires_accelerator and resolved.device is Device.cpu:
        return (
            f"model={resolved.model.name} is for accelerators (model.requires_accelerator=false runs it on "
            "the CPU all the same)"
        )
    if resolved.compile and resolved.device is Device.cpu and not _cxx():
        return "compile=true on the CPU needs a C++ compiler, and none was found (g++, or set CXX)"
    return None


def _makes_no_sense(config: Config) -> str | None:
    scenario, fault = config.scenario, config.fault
    for what, limits in ((f"scenario={scenario.name}", scenario.only), (f"fault={fault.name}", fault.only)):
        for axis, only in limits.items():
            if (value := config.value_of(axis)) not in only.values:
                may_be = ", ".join(only.values)
                return f"{what} takes {axis}={may_be} and not {value}: {only.because}"
    if not scenario.process_group and config.world_size != 1:
        return (
            f"scenario={scenario.name} is one process without a process group, not "
            f"world_size={config.world_size}"
        )
    if config.overlap_saves and not config.save.asynchronous:
        return (
            f"overlap_saves=true: with save={config.save.name} each save is complete before training goes on"
        )
    if config.load_parallel and not scenario.converts:
        return (
            f"load_parallel={config.load_parallel.name}: scenario={scenario.name} loads under the "
            "parallelism that it saved with"
        )
    return None


def _cxx() -> str | None:
    return shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")
