"""The extents of parameters under each parallelism, on four ranks whose collectives do nothing."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dcpbench.state.flags import sharing_memory, snapshot_gradients
from dcpbench.state.layout import Extent, extent_of
from dcpbench.state.snapshot import (
    EmptyShard,
    local_part,
    named_parameters,
    named_parts,
    snapshot_model,
    snapshot_optimizer,
)
from dcpbench.workloads.models import Tied
from support.names import by_text

RANKS = 4


class Meshes(NamedTuple):
    """Groups of all ranks, of the two that share a model's parts, of the two that share its batches."""

    both: DeviceMesh
    dp: DeviceMesh
    tp: DeviceMesh


@contextmanager
def rank(number: int) -> Iterator[Meshes]:
    """One of them. What DTensor caches belongs to one rank, so that each has names of its own in its mesh."""
    names = f"dp{number}", f"tp{number}"
    dist.init_process_group("fake", rank=number, world_size=RANKS)
    try:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        yield Meshes(mesh, *(mesh[name] for name in names))
    finally:
        dist.destroy_process_group()


def model() -> nn.Module:
    """Return a model in which every element is its index in the full parameter."""
    made = nn.Sequential(nn.Linear(6, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 2)), nn.Linear(2, 5))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape))
    return made


def fsdp1(module: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    own = {"device_mesh": mesh, "device_id": torch.device("cpu"), "use_orig_params": True}
    return FullyShardedDataParallel(module, **{**own, **options})


def fsdp1_in_fsdp1(module: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    """The outermost module has no parameters."""
    for name, child in module.named_children():
        setattr(module, name, fsdp1(child, mesh, **options))
    return fsdp1(module, mesh, **options)


def by_columns(module: nn.Module) -> nn.Module:
    """Put matrices into memory by columns."""
    for parameter in module.parameters():
        parameter.data = parameter.data.t().contiguous().t()
    return module


def in_wrappers(module: nn.Module) -> nn.Module:
    return nn.Sequential(*map(checkpoint_wrapper, module))


def sharded(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    fully_shard(module, mesh=mesh)
    return module


def tensor_parallel(module: nn.Module, mesh: Meshes) -> nn.Module:
    plan = {"0": ColwiseParallel(), "1.1": RowwiseParallel()}
    return parallelize_module(module, mesh.tp, plan, src_data_rank=None)


PARALLELISMS: dict[str, Callable[[nn.Module, Meshes], nn.Module]] = {
    "none": lambda module, mesh: module,
    "fsdp1": lambda module, mesh: fsdp1(module, mesh.dp),
    "fsdp1 in fsdp1": lambda module, mesh: fsdp1_in_fsdp1(module, mesh.dp),
    "fsdp1 without shards": lambda module, mesh: fsdp1(
        module, mesh.dp, sharding_strategy=ShardingStrategy.NO_SHARD
    ),
    "hsdp1": lambda module, mesh: fsdp1(module, mesh.both, sharding_strategy=ShardingStrategy.HYBRID_SHARD),
    "flat": lambda module, mesh: fsdp1(module, mesh.dp, use_orig_params=False),
    "flat in flat": lambda module, mesh: fsdp1_in_fsdp1(module, mesh.dp, use_orig_params=False),
    "flat in wrappers": lambda module, mesh: fsdp1(in_wrappers(module), mesh.dp, use_orig_params=False),
    "flat without shards": lambda module, mesh: fsdp1(
        module, mesh.dp, use_orig_params=False, sharding_strategy=ShardingStrategy.NO_SHARD
    ),
    "flat hsdp1": lambda module, mesh: fsdp1(
        module, mesh.both, use_orig_params=False, sharding_strategy=ShardingStrategy.HYBRID_SHARD
    ),
    "flat, tp": lambda module, mesh: fsdp1(tensor_parallel(module, mesh), mesh.dp, use_orig_params=False),
    "fsdp1 by columns": lambda module, mesh: fsdp1(by_columns(module), mesh.dp),
    "flat by columns": lambda module, mesh: fsdp1(by_columns(module), mesh.dp, use_orig_params=False),
    "tp": tensor_parallel,
    "fsdp1, tp": lambda module, mesh: fsdp1(tensor_parallel(module, mesh), mesh.dp),
    "fsdp2": lambda module, mesh: sharded(module, mesh.dp),
    "hsdp2": lambda module, mesh: sharded(module, mesh.both),
    "fsdp2, tp": lambda module, mesh: sharded(tensor_parallel(module, mesh), mesh.dp),
}


@pytest.mark.filterwarnings("ignore:The `NO_SHARD` sharding strategy is deprecated")
@pytest.mark.parametrize("parallelism", PARALLELISMS)
def test_elements_are_at_their_extents_place(parallelism: str) -> None:
    whole = {name: value.detach() for name, value in named_parameters(model()).items()}
    seen: dict[str, set[Extent]] = {name: set() for name in whole}
    for number in range(RANKS):
        with rank(number) as mesh:
            module = PARALLELISMS[parallelism](model(), mesh)
            parts = named_parts(module)
            assert [*parts] == [*whole]
            for name, tensor in whole.items():
                extent = parts[name].extent
                part = local_part(parts[name].of(parts[name].parameter)).reshape(-1)
                assert extent.shape == tensor.shape
                assert extent.numel == part.numel()
                assert torch.equal(extent.take(tensor), part)
                built = torch.full_like(tensor, -1.0)
                extent.put(built, part)
                assert torch.equal(extent.take(built), part)
                assert int((built >= 0).sum()) == extent.numel, "and nothing else is touched"
                assert [
                    tensor[tuple(extent.global_index(n))].item() for n in range(len(part))
                ] == part.tolist()
                seen[name].add(extent)
    for name, extents in seen.items():
        assert sum(extent.numel for extent in extents) == whole[name].numel(), name
        assert len(extents) > 1 or parallelism in ("none", "tp") or "without shards" in parallelism


def test_flat_parameters_are_read_by_name() -> None:
    options: dict[str, Any] = {"mesh_dim_names": ("dp",)}
    live = set[str]()
    for number in range(RANKS):
        with rank(number):
            module = fsdp1(Tied(3, 2), init_device_mesh("cpu", (RANKS,), **options), use_orig_params=False)
            (flat,) = module.parameters()
            optimizer = torch.optim.Adam([flat])
            flat.grad = flat.detach().clone()
            optimizer.step()
            parts, model = named_parts(module), snapshot_model(module)
            gradients = snapshot_gradients(parts)
            leaves = snapshot_optimizer(module, optimizer)
        names = [name for name, _ in Tied(3, 2).named_parameters()]
        assert by_text(model).keys() == named_parameters(Tied(3, 2)).keys() > {*names}
        assert leaves["param_groups", 0, "params"] == names
        own = {name for name in names if parts[name].extent.numel}
        assert {name for name in names if not isinstance(leaves["state", name, "step"], EmptyShard)} == own
        for name in own:
            place = parts[name].place
            assert torch.equal(model[name,].local, flat.detach()[place])
            assert torch.equal(gradients["gradients", name].local, flat.grad[place])
            moment = leaves["state", name, "exp_avg"]
            assert torch.equal(moment.local, optimizer.state[flat]["exp_avg"][place])
            assert moment.extent == model[name,].extent
        assert sharing_memory(leaves) == [], "each parameter has its own counter"
        tied = {name for names in sharing_memory(model) for name in names}
        assert tied == set() or tied > tied & own != set()
        live |= own
    assert live == {*names}


def test_scalar_tensor_has_one_chunk() -> None:
    extent = extent_of(torch.tensor(3.0))
    assert (extent.global_index(0), extent.take(torch.tensor(7.0)).tolist()) == ([], [7.0])
    one = torch.tensor(3.0)
    extent.put(one, torch.tensor([7.0]))
    assert one.item() == 7.0


@pytest.mark.parametrize("extent", [Extent((2, 3), (0,), (2, 3), 0, 6), Extent((2, 3), (0, 0), (2,), 0, 2)])
def test_invalid_extent_is_an_error(extent: Extent) -> None:
    with pytest.raises(ValueError, match=r"zip\(\) argument"):
        extent.take(torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"zip\(\) argument"):
        extent.global_index(1)
