"""How a model is spread over the ranks: one function for each parallelism.

Each takes the plain model (already on its device), the device mesh of the cell (None where the
parallelism has no mesh) and its configuration, and returns the module to train.
"""

import fnmatch
from collections import Counter
from unittest import mock

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import parallel as tp
from torch.nn.parallel import DistributedDataParallel

from dcpbench.config.groups import ParallelConfig

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_STYLES = {"colwise": tp.ColwiseParallel, "rowwise": tp.RowwiseParallel}


def none(model: nn.Module, mesh: DeviceMesh | None, config: ParallelConfig) -> nn.Module:
    """The model as it is, a replica on every rank, trained on the whole batch."""
    return model


def ddp(model: nn.Module, mesh: DeviceMesh, config: ParallelConfig) -> nn.Module:
    """DistributedDataParallel over the whole mesh."""
    return DistributedDataParallel(model, process_group=mesh.get_group(), **config.options)


def fsdp(model: nn.Module, mesh: DeviceMesh, config: ParallelConfig) -> nn.Module:
    """FSDP1: FULL_SHARD on one data-parallel dimension, HYBRID_SHARD on two, TP inside if it has one."""
    dp_mesh = _tensor_parallel(model, mesh, config)
    strategy = ShardingStrategy.HYBRID_SHARD if dp_mesh.ndim == 2 else ShardingStrategy.FULL_SHARD
    return FullyShardedDataParallel(
        model,
        device_mesh=dp_mesh,
        sharding_strategy=strategy,
        use_orig_params=True,
        # Without it FSDP1 asks for an accelerator even where the ranks run on the CPU.
        device_id=next(model.parameters()).device,
        **config.options,
    )


def fsdp2(model: nn.Module, mesh: DeviceMesh, config: ParallelConfig) -> nn.Module:
    """FSDP2: the root by `fully_shard`, TP inside if the mesh has it."""
    dp_mesh = _tensor_parallel(model, mesh, config)
    fully_shard(model, mesh=dp_mesh, **config.options)
    return model


def fsdp2_per_layer(model: nn.Module, mesh: DeviceMesh, config: ParallelConfig) -> nn.Module:
    """FSDP2 as trainers lay it out: each layer by `fully_shard`, then the root with what is left. A parameter
    that layers share is left to the root."""
    own = {layer: list(layer.parameters()) for _, _, layer in layers(model)}
    held = Counter(id(value) for values in own.values() for value in values)
    for layer, values in own.items():
        if values and all(held[id(value)] == 1 for value in values):
            fully_shard(layer, mesh=mesh, **config.options)
    fully_shard(model, mesh=mesh, **config.options)
    return model


def lay_out_buckets(model: nn.Module) -> None:
    """Have DDP lay its gradient buckets out anew, which it does once, after its first backward, and from then
    on sum in another order: a resumed run would differ from the uninterrupted one by that alone. It is a
    backward of the parameters themselves: nothing is drawn, and no buffer changes."""
    for ddp in model.modules():
        if isinstance(ddp, DistributedDataParallel):
            trained = [one for one in ddp.module.parameters() if one.requires_grad]
            with mock.patch.object(ddp.module, "forward", lambda own=trained: sum(map(torch.sum, own))):
                ddp().backward()
            ddp.zero_grad()


def layers(model: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    """The layers of a model, its children and those of the containers among them one by one: each with the
    module that holds it and its name there."""
    found: list[tuple[nn.Module, str, nn.Module]] = []
    for name, child in model.named_children():
        found += layers(child) if isinstance(child, _CONTAINERS) else [(model, name, child)]
    return found


def _tensor_parallel(model: nn.Module, mesh: DeviceMesh, config: ParallelConfig) -> DeviceMesh:
    """Apply the TP plan in place where the mesh has a tp dimension; return the data-parallel mesh.

    Raises:
        ValueError: the plan names a module that the model does not have, which torch only warns of.
    """
    if "tp" not in config.mesh:
        return mesh
    names = [name for name, _ in model.named_modules()]
    for name in config.tp_plan:
        if not fnmatch.filter(names, name):
            raise ValueError(f"parallel.tp_plan: the model has no module {name}")
    plan = {name: _STYLES[style]() for name, style in config.tp_plan.items()}
    tp.parallelize_module(model, mesh["tp"], plan)
    return mesh[tuple(name for name in config.mesh if name != "tp")]
