"""Build the runs of a cell: under its parallelism, and the unwrapped ones that these are compared with, which
compute in the dtypes of the parallelism."""

import math
import pkgutil
import platform
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import psutil
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

from dcpbench.compare.leaves import same_value
from dcpbench.config.groups import ParallelConfig
from dcpbench.config.mesh import dp_degree
from dcpbench.config.schema import Config
from dcpbench.core.rank_report import Skip
from dcpbench.runs.own_run import OwnRun
from dcpbench.runs.own_trainer import TrainerRun
from dcpbench.runs.put import copy_state
from dcpbench.runs.run import NO_EXCLUSIONS, Exclusions, Run
from dcpbench.state.layout import is_dictionary
from dcpbench.state.snapshot import (
    local_part,
    named_parameters,
    named_parts,
)
from dcpbench.torch_private import COMMUNICATION_HOOKS, PYTREE, VERSION
from dcpbench.workloads import parallelisms
from dcpbench.workloads.components import Component, ComponentContext
from dcpbench.workloads.generators import seed_generators
from dcpbench.workloads.optimizers import as_one_optimizer, each_optimizer
from dcpbench.workloads.pipeline import Pipeline
from dcpbench.workloads.stateful import Noise
from dcpbench.workloads.workload import Workload, workload_of
from dcpbench.workloads.world import LARGE_MODEL_BYTES, World

_BATCH_NORM = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_BATCH_STATISTICS = "batch normalisation sees a rank's share of each batch"


def build_configured(config: Config, world: World, seed: int, exclusions: Exclusions = NO_EXCLUSIONS) -> Run:
    """Build the run of a cell, or its user's trainer; an earlier run has shown the `exclusions`."""
    if config.own_trainer:
        return TrainerRun(config, world, seed, exclusions)
    return build(config, world, seed, exclusions)


def build(config: Config, world: World, seed: int, exclusions: Exclusions = NO_EXCLUSIONS) -> OwnRun:
    """Build the run of a cell under its parallelism, compiled if the cell is.

    Args:
        exclusions: those that an earlier run of the cell has shown.
    """
    sizes = config.parallel.mesh_sizes(world.size)
    workload = seeded_workload(config, world.device, seed)
    _check_step(workload, config)
    parallelisms.wrap_layers(
        workload.model, config.activation_checkpointing, config.compiles_layers, workload.layers
    )
    plan = parallelisms.with_layers(config.parallel, workload.layers, workload.tp_plan)
    config = replace(config, parallel=plan)
    model = parallelisms.wrap_model(config, world, workload.model)
    if config.compile and not config.compiles_layers:
        model = parallelisms.compiled(model)
    component = _component(config, world, seed, partial(parallelisms.wrap_model, config, world))
    pipeline = None
    if "pp" in sizes:
        mesh = world.mesh(sizes)
        assert mesh, "not divided"
        assert workload.loss, "not divided"
        pipeline = Pipeline(model, mesh["pp"], config.parallel, workload.loss)
    sees_share = dp_degree(sizes) > 1 and any(isinstance(module, _BATCH_NORM) for module in model.modules())
    why_none, nbytes = getattr(workload.model, "why_no_twin", None), twin_bytes(config, model, sizes)
    exclusions = replace(
        exclusions,
        why_no_twin=why_none or why_no_memory(world, nbytes, "pp" in sizes),
        why_no_replicas=why_none,
        why_layout_bound=why_none or (_BATCH_STATISTICS if sees_share else None),
        compute_dtypes=(*mixed_precision_dtypes(config.parallel),),
    )
    workload = replace(workload, model=model)
    run = OwnRun(
        config,
        world,
        workload,
        component,
        seed,
        pipeline=pipeline,
        exclusions=exclusions,
        twin_bytes=nbytes,
    )
    kinds = {type(optimizer).__name__ for optimizer in each_optimizer(run.optimizer)}
    if parallelisms.flattens_parameters(model) and "Adafactor" in kinds:  # a load can hang
        raise Skip("Adafactor needs full matrices, which FSDP1 flattens; use parallel=ddp")
    return run


def skip_groups_by_shape(config: Config, run: OwnRun, twin: OwnRun) -> None:
    """Check that the parameters of a run are in the groups in which a plain model's are.

    Raises:
        Skip: a workload chooses groups by dimensions, and FSDP1 flattens parameters.
    """
    here, plain = (_groups(trained.model, trained.optimizer) for trained in (run, twin))
    differing = [name for name, group in here.items() if not same_value(group, plain.get(name))]
    if not (parallelisms.flattens_parameters(run.model) and differing and config.workload.target):
        return
    workload = seeded_workload(config, twin.world.device, config.seed)
    for parameter in workload.model.parameters():
        parameter.data = parameter.data.reshape(-1)
    if same_value(here, _groups(workload.model, as_one_optimizer(workload.optimizer(workload.model)))):
        which = (
            f"{differing[0]} and {len(differing) - 1} more are"
            if len(differing) > 1
            else f"{differing[0]} is"
        )
        fix = "choose groups by name, or use fsdp2"
        raise Skip(f"FSDP1: parameters are one-dimensional here, so that {which} in another group; {fix}")


def _groups(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the options of each parameter's group by FQN."""
    options = {
        id(parameter): {key: option for key, option in group.items() if not key.startswith("param")}
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    return {name: options.get(id(parameter)) for name, parameter in named_parameters(model).items()}


def build_twin(config: Config, world: World, seed: int, state_of: OwnRun | None = None) -> OwnRun:
    """Build an unwrapped, uncompiled run that trains on this rank's share of each batch, in the dtypes of the
    parallelism; in the state of another run, if there is one, then collective."""
    workload, component = seeded_workload(config, world.device, seed), _component(config, world, seed)
    called = cast_as_fsdp(workload.model, config.parallel)
    twin = OwnRun(config, world, workload, component, seed, called=called)
    if state_of:
        copy_state(state_of, twin)
    return twin


def twin_bytes(config: Config, model: nn.Module, sizes: Mapping[str, int]) -> int:
    """Estimate the memory of the unsharded twin on each rank: parameters, gradients and two moments, three
    times if copies of it take steps in addition, and in float64 gradients and their magnitudes."""
    copies = 3 if parallelisms.runs_other_kernels(config, sizes) else 1
    parts = {id(part): part for part in named_parts(model).values()}.values()  # tied ones once
    sizes_of_parts = (
        math.prod(part.extent.shape) * (4 * copies * part.parameter.itemsize + 16) for part in parts
    )
    return sizes.get("pp", 1) * sum(sizes_of_parts)


def why_no_memory(world: World, nbytes: int, always: bool) -> str | None:
    """Return why some rank has no memory for a twin of this size, the same on every rank; collective if it is
    large, and for stages of a pipeline, which estimate different sizes (`always`)."""
    if nbytes < LARGE_MODEL_BYTES and not always:
        return None
    place, free = platform.node(), psutil.virtual_memory().available
    if world.device.type == "cuda":
        place += str(getattr(torch.cuda.get_device_properties(world.device), "uuid", world.device))
        cached = torch.cuda.memory_reserved(world.device) - torch.cuda.memory_allocated(world.device)
        free = torch.cuda.mem_get_info(world.device)[0] + cached
    of_ranks = world.gathered((place, nbytes, free))
    for there, _, has in of_ranks:
        if (needed := sum(size for where, size, _ in of_ranks if where == there)) > has:
            gib = f"{needed / 2**30:.1f} GiB, and {has / 2**30:.1f} GiB are free"
            return f"an unsharded copy of the model on each rank takes about {gib}"
    return None


def build_unrestored(config: Config, world: World, seed: int) -> Run:
    """Build a run from another seed, for negative controls, with other values of all trained parameters than
    its model begins with: those may be the same for each seed. It draws the noise of the cell, so that it
    differs from a restored run only in restored state, and trains on shares of batches, as a loss may accept
    nothing else."""
    unrestored: Run
    if config.own_trainer:
        unrestored = TrainerRun(config, world, seed)
    else:
        unrestored = build_twin(config, world, seed)
        unrestored.noise.load_state_dict(Noise(config.seed).state_dict())
    with torch.no_grad():
        for parameter in unrestored.model.parameters():
            if parameter.requires_grad:
                local_part(parameter).mul_(1.0625).add_(0.0625)
    return unrestored


def _component(
    config: Config, world: World, seed: int, wrap: Callable[[nn.Module], Any] = lambda plain: plain
) -> Component:
    """Build the component of a run; `wrap` puts a plain model under the parallelism of the run."""
    context = ComponentContext(
        world.device, config.seed, lambda: seeded_workload(config, world.device, seed).model, wrap
    )
    component: Component = pkgutil.resolve_name(config.component.target)(context, **config.component.options)
    return component


def seeded_workload(config: Config, device: torch.device, seed: int) -> Workload:
    """Build the workload of a cell on a device, from a seed."""
    seed_generators(seed, device)
    with device:
        workload = workload_of(config)
    return replace(workload, model=workload.model.to(device))


def _check_step(workload: Workload, config: Config) -> None:
    """Check what a workload with `step` is combined with.

    Raises:
        Skip: something else in the cell computes gradients or steps.
    """
    if not workload.step:
        return
    component = pkgutil.resolve_name(config.component.target)
    methods = ("backward", "unscale", "step")
    scales = any(getattr(component, name) is not getattr(Component, name) for name in methods)
    where = f"workload.target={config.workload.target}: step"
    if "pp" in config.parallel.mesh:
        raise Skip(f"{where}: parallel={config.parallel.name} computes the gradients itself; use loss")
    if scales:
        raise Skip(f"{where}: component={config.component.name} changes the backward pass; do that in step")


def mixed_precision_dtypes(config: ParallelConfig) -> frozenset[torch.dtype]:
    """Return the dtypes of mixed precision that a parallelism computes in."""
    policy = parallelisms.fully_shard_options(config).get("mp_policy", MixedPrecisionPolicy())
    return frozenset(filter(None, (policy.param_dtype, policy.reduce_dtype, policy.output_dtype)))


_REDUCED_IN: dict[Callable[..., Any], torch.dtype | None] = {
    default_hooks.allreduce_hook: None,
    default_hooks.fp16_compress_hook: torch.float16,
    default_hooks.bf16_compress_hook: torch.bfloat16,
}
"""The dtype in which DDP's communication hooks reduce gradients; None is the gradient's."""
_tree_map_only = PYTREE.value.tree_map_only


def reduction_dtype(model: nn.Module, config: ParallelConfig) -> tuple[torch.dtype | None, str | None]:
    """Return the dtype in which gradients are reduced, None if it is the gradient's; and why they are not the
    mean of the ranks' gradients, if they are not."""
    for ddp in (module for module in model.modules() if isinstance(module, DistributedDataParallel)):
        for hook, _ in COMMUNICATION_HOOKS.of(ddp):
            if hook not in _REDUCED_IN:
                name = getattr(hook, "__qualname__", type(hook).__qualname__)
                return None, f"the communication hook {name} changes gradients"
            return _REDUCED_IN[hook], None
    policy = parallelisms.fully_shard_options(config).get("mp_policy")
    return (policy.reduce_dtype or policy.param_dtype if policy else None), None


class _CastAsFsdp(nn.Module):
    """A plain model that computes in the dtypes of FSDP's mixed precision: it casts parameters, inputs and
    output."""

    def __init__(self, model: nn.Module, policy: MixedPrecisionPolicy) -> None:
        super().__init__()
        self._model, self._policy = model, policy
        self._casts: dict[str, tuple[Any, torch.Tensor]] = {}

    def forward(self, *inputs: Any, **options: Any) -> Any:
        policy = self._policy
        parameters: dict[str, torch.Tensor] = dict(self._model.named_parameters())
        if dtype := policy.param_dtype:
            parameters = {
                name: self._parameter_in(dtype, name, parameter) for name, parameter in parameters.items()
            }
            if policy.cast_forward_inputs:
                inputs, options = _cast((inputs, options), dtype)
        output = torch.func.functional_call(self._model, parameters, inputs, options)
        return _cast(output, policy.output_dtype) if policy.output_dtype else output

    def _parameter_in(self, dtype: torch.dtype, name: str, parameter: torch.Tensor) -> torch.Tensor:
        """Cast a parameter once for all forward passes before it changes: so the gradients of several passes
        are summed in this dtype, as by FSDP, which casts no integers."""
        if not parameter.is_floating_point():
            return parameter
        state = VERSION.of(parameter), parameter.requires_grad and torch.is_grad_enabled()
        if name not in self._casts or self._casts[name][0] != state:
            self._casts[name] = state, parameter.to(dtype)
        return self._casts[name][1]


def _cast(values: Any, dtype: torch.dtype) -> Any:
    """Cast as `fully_shard` does, which leaves unknown objects as they are."""
    return _tree_map_only(
        torch.Tensor, lambda value: value.to(dtype) if value.is_floating_point() else value, values
    )


def cast_as_fsdp(model: nn.Module, config: ParallelConfig) -> nn.Module:
    """Return a plain model that computes in the dtypes of a parallelism."""
    policy = parallelisms.fully_shard_options(config).get("mp_policy")
    if policy and is_dictionary(model):
        return nn.ModuleDict({name: _CastAsFsdp(module, policy) for name, module in model.items()})
    return _CastAsFsdp(model, policy) if policy else model
