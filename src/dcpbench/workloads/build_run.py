"""Builds the runs of a cell: under its parallelism, or as what they are compared with."""

import pkgutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions

from dcpbench.config.mesh import dp_degree
from dcpbench.config.schema import Config
from dcpbench.verify.snapshot import local_part, named_parameters
from dcpbench.workloads.components import Component, ComponentContext
from dcpbench.workloads.optimizers import InBackward
from dcpbench.workloads.parallelisms import (
    cast_as_fsdp,
    computes_in,
    lay_out_buckets,
    wrap_layers,
    wrap_model,
)
from dcpbench.workloads.pipeline import Pipeline
from dcpbench.workloads.stateful import Noise
from dcpbench.workloads.trainer_run import TrainerRun
from dcpbench.workloads.training_run import TrainingRun
from dcpbench.workloads.workload import Workload, workload_of
from dcpbench.workloads.world import World

_BATCH_NORM = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def build(config: Config, world: World, seed: int, scheduler: bool = True) -> TrainingRun:
    """The model of a cell under its parallelism, compiled if the cell says so, and its optimizer; or the
    trainer that it has instead. Without its `scheduler` that is made when it is loaded."""
    if config.own_trainer:
        return TrainerRun(config, world, seed)
    sizes = config.parallel.mesh_sizes(world.size)
    workload = _workload(config, world.device, seed)
    wrap_layers(workload.model, config.activation_checkpointing, config.compiles_layers)
    model = wrap_model(config, world, workload.model)
    lay_out_buckets(model)
    if config.compile and not config.compiles_layers:
        model = torch.compile(model, dynamic=False)
    component = _component(config, world, seed, partial(wrap_model, config, world))
    run = TrainingRun(workload, world, sizes, model, seed, scheduler, component)
    if "pp" in sizes:
        stages = world.submesh(sizes, "pp")
        run.pipeline = Pipeline(model, stages, config.parallel, workload.loss)
    run.computes_in = computes_in(config.parallel)
    if dp_degree(sizes) > 1 and any(isinstance(one, _BATCH_NORM) for one in model.modules()):
        run.why_layout_bound = "batch normalisation sees a rank's share of each batch"
    run.why_no_twin = getattr(workload.model, "why_no_twin", run.why_no_twin)
    run.options = StateDictOptions(**config.state_dict.options())
    run.optimizer_state = config.optimizer_state
    if config.workload.target and run.options.ignore_frozen_params:
        parameters = named_parameters(model).items()
        run.left_out = [name for name, value in parameters if not value.requires_grad]
    return run


def build_plain(config: Config, world: World, seed: int) -> TrainingRun:
    """The same model from the same seed, unwrapped and uncompiled, trained on the whole batch."""
    workload = _workload(config, world.device, seed)
    alone, component = World(0, 1, world.device, None, None), _component(config, world, seed)
    return TrainingRun(workload, alone, {}, workload.model, seed, component=component)


def build_twin(config: Config, world: World, seed: int) -> TrainingRun:
    """The same model from the same seed, unwrapped and uncompiled, trained on this rank's share of the batch,
    in the dtypes of the parallelism. Its optimizer steps when it is told to."""
    sizes = config.parallel.mesh_sizes(world.size)
    workload = _workload(config, world.device, seed)
    component = _component(config, world, seed)
    run = TrainingRun(workload, world, sizes, workload.model, seed, component=component)
    run.called = cast_as_fsdp(workload.model, config.parallel)
    if isinstance(run.optimizer, InBackward):
        run.optimizer.in_backward = False
    return run


def build_replica(config: Config, world: World, seed: int) -> TrainingRun:
    """The same, its gradients divided by the number of shares but never summed; its losses are the ranks'
    mean."""
    run = build_twin(config, world, seed)
    for parameter in run.model.parameters():
        if parameter.requires_grad:
            parameter.register_hook(lambda gradient: gradient / dp_degree(run.sizes))
    return run


def build_unrestored(config: Config, world: World, seed: int) -> TrainingRun:
    """A plain run from another seed that draws what the cell's draw: at each step it differs from a run that
    was restored there in nothing but what is restored. A trainer as it is built anew, with other weights."""
    if config.own_trainer:
        other = TrainerRun(config, world, seed)
        with torch.no_grad():
            for parameter in other.model.parameters():
                local_part(parameter).mul_(1.0625).add_(0.0625)
        return other
    unrestored = build_plain(config, world, seed)
    unrestored.noise = Noise(config.seed)
    return unrestored


def _component(
    config: Config, world: World, seed: int, wrap: Callable[[nn.Module], Any] = lambda plain: plain
) -> Component:
    """That of a run from this seed; `wrap` puts a plain model under the parallelism of the run."""
    made_for = ComponentContext(
        world.device, config.seed, lambda: _workload(config, world.device, seed).model, wrap
    )
    component: Component = pkgutil.resolve_name(config.component.target)(made_for, **config.component.options)
    return component


def _workload(config: Config, device: torch.device, seed: int) -> Workload:
    torch.manual_seed(seed)
    with device:
        workload = workload_of(config)
    return replace(workload, model=workload.model.to(device))
