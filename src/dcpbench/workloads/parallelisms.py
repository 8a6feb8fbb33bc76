"""The parallelisms, a function for each, and the layers of a model that they shard, recompute or compile.

A parallelism takes the plain model on its device, the device mesh of the cell (None if it has none) and its
configuration, and returns the module to train.
"""

import copy
import fnmatch
import pkgutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor
from torch.distributed.tensor import parallel as tp
from torch.nn.parallel import DistributedDataParallel

from dcpbench import torch_private as private
from dcpbench.config.groups import ActivationCheckpointing, ParallelConfig
from dcpbench.config.mesh import SHARE_DATA
from dcpbench.config.schema import Config
from dcpbench.core.rank_report import Skip
from dcpbench.state.layout import is_dictionary
from dcpbench.state.snapshot import persistent_buffers, plain_fqn
from dcpbench.workloads.pipeline import keep_stage
from dcpbench.workloads.world import World, with_timeout

_STYLES: dict[str, Callable[[], tp.ParallelStyle]] = {
    "colwise": tp.ColwiseParallel,
    "rowwise": tp.RowwiseParallel,
    # Between two of these each rank of a tp group has a part of the samples, its first dimension.
    "rowwise_to_sequence": lambda: tp.RowwiseParallel(output_layouts=Shard(0)),
    "sequence": lambda: tp.SequenceParallel(sequence_dim=0),
    "colwise_from_sequence": lambda: tp.ColwiseParallel(input_layouts=Shard(0)),
}

# Not looked up in a forward pass, which can be compiled.
_gather, _scatter = private.GATHER_WITH_GRADIENT.value, private.SCATTER_WITH_GRADIENT.value

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_WITHOUT_FORWARD = (nn.ModuleList, nn.ModuleDict)

Layer = tuple[nn.Module, str, nn.Module]
"""The module that has a layer, its name there, and the layer."""


@dataclass
class PlannedParallel(ParallelConfig):
    """The configuration of a parallelism, with the layers that a user's workload names."""

    layers: list[str] = field(default_factory=list)


def with_layers(
    parallel: ParallelConfig, layers: Sequence[str], tp_plan: Mapping[str, str]
) -> PlannedParallel:
    """Return a configuration with the layers of a workload, and with its TP plan if it has none."""
    values = {
        config_field.name: getattr(parallel, config_field.name) for config_field in fields(ParallelConfig)
    }
    return PlannedParallel(**{**values, "tp_plan": parallel.tp_plan or tp_plan}, layers=[*layers])


def wrap_model(config: Config, world: World, model: nn.Module) -> Any:
    """Put a plain model on its device under the parallelism of the cell, of a dictionary each module.

    Raises:
        Skip: it is a dictionary, and the parallelism divides a single module.
    """
    wrap = pkgutil.resolve_name(config.parallel.target)
    mesh = world.mesh(config.parallel.mesh_sizes(world.size))
    if not is_dictionary(model):
        return wrap(model, mesh, config.parallel)
    if divided := {"pp", "ep", "tp"}.intersection(config.parallel.mesh):
        target = f"workload.target={config.workload.target}: model is an nn.ModuleDict"
        raise Skip(
            f"{target}, of which {', '.join(sorted(divided))} cannot divide one module; use ddp or fsdp2"
        )
    model.update({name: wrap(module, mesh, config.parallel) for name, module in model.items()})
    return model


def none(model: nn.Module, mesh: DeviceMesh | None, config: ParallelConfig) -> nn.Module:
    """No parallelism: a replica on every rank, trained on full batches."""
    return model


def ddp(model: nn.Module, mesh: DeviceMesh, config: ParallelConfig) -> nn.Module:
    """DistributedDataParallel over the whole mesh, except of a module without trained parameters, such as a
    frozen teacher, which torch refuses."""
    if not is_trained(model):
        return model
    return _CopiedDDP(model, process_group=mesh.get_group(), **config.options)


def is_trained(model: nn.Module) -> bool:
    """Return whether a model has a parameter that requires a gradient."""
    return any(parameter.requires_grad for parameter in model.parameters())


class _CopiedDDP(DistributedDataParallel):
    """DDP that can be copied, as by `AveragedModel`, although its process group is not the default one, which
    is all that torch copies."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "_CopiedDDP":
        made = memo[id(self)] = type(self).__new__(type(self))
        with private.DEFAULT_GROUP_OF_DDP.patch(lambda: self.process_group):
            state = self.__getstate__()  # type: ignore[no-untyped-call]
            made.__setstate__(copy.deepcopy(state, memo))  # type: ignore[no-untyped-call]
        return made


def fsdp(model: nn.Module, mesh: DeviceMesh, config: ParallelConfig) -> nn.Module:
    """FSDP1: FULL_SHARD on one data-parallel dimension, HYBRID_SHARD on two; TP inside if the mesh has it."""
    dp_mesh = _tensor_parallel(model, mesh, config)
    strategy = ShardingStrategy.HYBRID_SHARD if dp_mesh.ndim == 2 else ShardingStrategy.FULL_SHARD
    options: dict[str, Any] = {
        "device_mesh": dp_mesh,
        "sharding_strategy": strategy,
        "use_orig_params": True,
        # Without it FSDP1 requires an accelerator even for ranks on the CPU.
        "device_id": next(model.parameters()).device,
    }
    return FullyShardedDataParallel(model, **{**options, **config.options})


def fsdp2(model: nn.Module, mesh: DeviceMesh, config: ParallelConfig) -> nn.Module:
    """FSDP2: `fully_shard` of the root; TP inside if the mesh has it."""
    fully_shard(model, mesh=_tensor_parallel(model, mesh, config), **fully_shard_options(config))
    return model


def fsdp2_per_layer(model: nn.Module, mesh: DeviceMesh, config: ParallelConfig) -> nn.Module:
    """FSDP2 as in trainers: `fully_shard` of each layer, then of the root with the remaining parameters,
    among them those that layers share. TP inside if the mesh has it."""
    dp_mesh, options = _tensor_parallel(model, mesh, config), fully_shard_options(config)
    named = config.layers if isinstance(config, PlannedParallel) else ()
    for layer in _layers_of_their_own(model, named):
        fully_shard(layer, mesh=dp_mesh, **options)
    fully_shard(model, mesh=dp_mesh, **options)
    return model


def tensor_parallel(model: nn.Module, mesh: DeviceMesh, config: ParallelConfig) -> nn.Module:
    """Tensor parallelism alone: parameters that the plan does not name are replicas on every rank."""
    _tensor_parallel(model, mesh, config)
    return model


@contextmanager
def buckets_kept() -> Iterator[None]:
    """Context manager: DDP does not rearrange its gradient buckets, which it does before the second step. It
    would sum in another order from then on, and a resumed run would differ by that alone."""

    def kept(reducer: Any) -> bool:
        private.CHECK_REDUCED.of(reducer)()  # which reports parameters without a gradient, as rebuilding does
        return False

    with private.REBUILD_BUCKETS.patch(kept):
        yield


def end_passes(model: nn.Module) -> None:
    """End the passes of a step, before anything else looks at the model or communicates: `fully_shard` keeps
    a root gathered after a forward pass alone, and DDP's reduction of gradients could meet another one.

    Raises:
        RuntimeError: DDP has not reduced the gradients, as a parameter has none.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
        elif isinstance(module, DistributedDataParallel):
            private.CHECK_REDUCED.of(module.reducer)()


def check_plan(model: nn.Module, plan: Mapping[str, str]) -> None:
    """Check the TP plan of a workload.

    Raises:
        ValueError: it names a module that the model lacks, or an unknown style.
    """
    names = [name for name, _ in model.named_modules()]
    for pattern, style in plan.items():
        if not fnmatch.filter(names, str(pattern)):
            raise ValueError(f"tp_plan: the model has no module {pattern}")
        if style not in _STYLES:
            raise ValueError(f"tp_plan: {pattern}={style}: unknown style; choose one of {', '.join(_STYLES)}")


def pipeline(model: nn.Module, mesh: DeviceMesh, config: ParallelConfig) -> nn.Module:
    """This rank's stage of a pipeline, with `fully_shard` of each layer; TP inside if the mesh has it."""
    keep_stage(model, mesh["pp"])
    return fsdp2_per_layer(model, mesh, config)


def expert_parallel(model: nn.Module, mesh: DeviceMesh, config: ParallelConfig) -> nn.Module:
    """Experts over `ep`, with `fully_shard` of each rank's over `dp_shard`; everything else by `fully_shard`
    over all ranks. Every rank has different samples, which all experts see."""
    options = fully_shard_options(config)
    for name in config.ep_plan:
        experts = model.get_submodule(name)
        hooks: Any = _to_all_experts, _to_own_samples
        distribute_module(experts, mesh["ep"], _shard_first, *hooks)
        sharded = fully_shard(experts, mesh=mesh["dp_shard"], **options)
        # gloo can only sum, and over one rank torch then divides twice: findings/gradient-divide-factor.md
        sharded.set_force_sum_reduction_for_comms(mesh["dp_shard"].size() > 1)
        # Their gradients are sums over the samples of all ranks in an `ep` group.
        sharded.set_gradient_divide_factor(mesh.size())
    fully_shard(model, mesh=with_timeout(private.FLATTEN_MESH.of(mesh)("dp_shard_ep")), **options)
    return model


def _shard_first(_: str, module: nn.Module, mesh: DeviceMesh) -> None:
    for name, parameter in list(module.named_parameters(recurse=False)):
        module.register_parameter(name, nn.Parameter(distribute_tensor(parameter, mesh, [Shard(0)])))


def _to_all_experts(_: nn.Module, inputs: tuple[torch.Tensor, torch.Tensor], mesh: DeviceMesh) -> Any:
    # One collective: two at a time sometimes end the process on gloo (findings/gloo-two-gathers.md).
    gathered = _gather(torch.cat(inputs, dim=1), 0, mesh)
    samples, weights = gathered.split([tensor.shape[1] for tensor in inputs], dim=1)
    return samples, weights.tensor_split(mesh.size(), dim=1)[mesh.get_local_rank()]


def _to_own_samples(_: nn.Module, output: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    samples: torch.Tensor = _scatter(output, "sum", 0, mesh)
    return samples


def flattens_parameters(model: nn.Module) -> bool:
    """Return whether FSDP1 has flattened parameters of a model."""
    return any(isinstance(module, FullyShardedDataParallel) for module in model.modules())


def broadcasts_buffers(model: nn.Module) -> bool:
    """Return whether each forward pass begins with the first rank's buffers."""
    return any(
        isinstance(module, DistributedDataParallel) and module.broadcast_buffers for module in model.modules()
    )


def overwritten_buffers(model: nn.Module) -> set[str]:
    """Return the FQNs of this rank's buffers that DDP overwrites by the first rank's in each forward pass."""
    wrapped = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    overwritten = {
        id(buffer)
        for wrapper in wrapped
        if wrapper.broadcast_buffers and dist.get_rank(wrapper.process_group)
        for name, buffer in wrapper.module.named_buffers()
        if name not in wrapper.parameters_to_ignore
    }
    return {name for name, buffer in persistent_buffers(model).items() if id(buffer) in overwritten}


def runs_other_kernels(config: Config, sizes: Mapping[str, int]) -> bool:
    """Return whether a plain model cannot run the ranks' kernels: because tensors, layers or samples of
    experts are split, code is compiled, kernels are not deterministic, or the parallelism is a user's."""
    split = {"pp", "ep", "tp"} & sizes.keys()
    known = config.parallel.target.startswith(f"{__name__}.")
    return bool(split or config.compile or not config.deterministic or not known)


def layers(model: nn.Module, patterns: Sequence[str] = ()) -> list[Layer]:
    """Return the layers of a model, wrappers included.

    Args:
        patterns: of their names in the plain model, in which `*` stands for one part: `model.layers.*`. By
            default layers are the children of the model, or theirs if they are containers.

    Raises:
        ValueError: a pattern matches nothing or a list of modules, or a layer is inside another.
    """
    if patterns:
        named_layers = ((name.rpartition("."), model.get_submodule(name)) for name in _named(model, patterns))
        return [(model.get_submodule(above), last, layer) for (above, _, last), layer in named_layers]
    inner: list[Layer] = []
    for name, child in model.named_children():
        inner += layers(child) if isinstance(child, _CONTAINERS) else [(model, name, child)]
    return inner


def _layers_of_their_own(model: nn.Module, patterns: Sequence[str] = ()) -> list[nn.Module]:
    """Return the layers with parameters that no other layer shares; `patterns` are those of `layers`."""
    of_layer = {layer: list(layer.parameters()) for _, _, layer in layers(model, patterns)}
    held = Counter(id(parameter) for values in of_layer.values() for parameter in values)
    return [
        layer
        for layer, values in of_layer.items()
        if values and all(held[id(parameter)] == 1 for parameter in values)
    ]


def _named(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    names: dict[str, str] = {}
    for name, _ in model.named_modules():
        # The outermost of a layer's wrappers comes first.
        names.setdefault(plain_fqn(model, f"{name}.").rstrip("."), name)
    matched: list[str] = []
    for pattern in patterns:
        matching = [name for name in names if name and _matches(name, pattern)]
        if not matching:
            raise ValueError(f"layers: the model has no module {pattern}")
        matched += (name for name in matching if name not in matched)
    for name in matched:
        module = model.get_submodule(names[name])
        if isinstance(module, _WITHOUT_FORWARD):
            raise ValueError(f"layers: {name} is a {type(module).__name__}; pass {name}.*")
        if outer := next(
            (other_layer for other_layer in matched if name.startswith(f"{other_layer}.")), None
        ):
            raise ValueError(f"layers: {name} is inside {outer}; pass only one of them")
    return [names[name] for name in matched]


def _matches(name: str, pattern: str) -> bool:
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatch.fnmatchcase, parts, patterns))


def wrap_layers(
    model: nn.Module,
    checkpointing: ActivationCheckpointing | None,
    compiled: bool,
    patterns: Sequence[str] = (),
) -> None:
    """Wrap each layer of a plain model in activation checkpointing, compile it separately, or both. The names
    of layers match `patterns`."""
    for holder, name, layer in layers(model, patterns):
        wrapped: Any = layer
        if checkpointing is ActivationCheckpointing.layer:
            wrapped = private.CHECKPOINT_WRAPPER.value(wrapped)
        if compiled:
            wrapped = torch.compile(wrapped, dynamic=False)
        if checkpointing is ActivationCheckpointing.compiled_layer:
            wrapped = private.CHECKPOINT_WRAPPER.value(wrapped)
        holder.register_module(name, wrapped)


def compiled(model: nn.Module) -> Any:
    """Compile a model, of a dictionary each module."""
    if is_dictionary(model):
        model.update({name: compiled(module) for name, module in model.items()})
        return model
    return torch.compile(model, dynamic=False)


def fully_shard_options(config: ParallelConfig) -> dict[str, Any]:
    """Return the options of `fully_shard`, with its policies; null is torch's default."""
    options: dict[str, Any] = {name: option for name, option in config.options.items() if option is not None}
    if "mp_policy" in options:
        policy = {
            name: getattr(torch, dtype) if isinstance(dtype, str) else dtype
            for name, dtype in options["mp_policy"].items()
        }
        options["mp_policy"] = MixedPrecisionPolicy(**policy)
    if "offload_policy" in options:
        options["offload_policy"] = CPUOffloadPolicy(**options["offload_policy"])
    return options


def _tensor_parallel(model: nn.Module, mesh: DeviceMesh, config: ParallelConfig) -> DeviceMesh:
    """Apply the TP plan in place if the mesh has a tp dimension; return the data-parallel mesh. A stage of a
    pipeline need not have all modules of the plan.

    Raises:
        ValueError: the model lacks a module of the plan; torch only warns.
    """
    rest = tuple(name for name in config.mesh if name not in SHARE_DATA)
    if "tp" not in config.mesh:
        return mesh[rest] if "pp" in config.mesh else mesh
    if not config.tp_plan:
        fix = "set tp_plan of the Workload, or +parallel.tp_plan={my_layer:colwise}"
        raise Skip(f"parallel={config.name}: the workload has no tp_plan to shard it by; {fix}")
    # The innermost of a layer's wrappers, which come before what they wrap.
    names = {plain_fqn(model, f"{name}.").rstrip("."): name for name, _ in model.named_modules()}
    plan: dict[str, tp.ParallelStyle] = {}
    for pattern, style in config.tp_plan.items():
        matching = fnmatch.filter(names, pattern)
        if not matching and "pp" not in config.mesh:
            raise ValueError(f"parallel.tp_plan: the model has no module {pattern}")
        plan |= {names[name]: _STYLES[style]() for name in matching}
    tp.parallelize_module(model, mesh["tp"], plan)
    return mesh[rest] if rest else mesh
