"""Where the parts of parameters lie under each parallelism, on four ranks whose collectives do nothing."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dcpbench.verify.layout import Extent, extent_of, parameter_extents
from dcpbench.verify.snapshot import local_part, named_parameters

RANKS = 4


class Meshes(NamedTuple):
    """Of all ranks, of the two that share a model's parts, of the two that share its batches."""

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
    """Every element is its own index in the whole of its parameter."""
    made = nn.Sequential(nn.Linear(6, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 2)), nn.Linear(2, 5))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape))
    return made


def fsdp1(module: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    device = torch.device("cpu")
    return FullyShardedDataParallel(
        module, device_mesh=mesh, device_id=device, use_orig_params=True, **options
    )


def fsdp1_in_fsdp1(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """The outermost has no parameters of its own."""
    for name, child in module.named_children():
        setattr(module, name, fsdp1(child, mesh))
    return fsdp1(module, mesh)


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
    "tp": tensor_parallel,
    "fsdp1, tp": lambda module, mesh: fsdp1(tensor_parallel(module, mesh), mesh.dp),
    "fsdp2": lambda module, mesh: sharded(module, mesh.dp),
    "hsdp2": lambda module, mesh: sharded(module, mesh.both),
    "fsdp2, tp": lambda module, mesh: sharded(tensor_parallel(module, mesh), mesh.dp),
}


@pytest.mark.filterwarnings("ignore:The `NO_SHARD` sharding strategy is deprecated")
@pytest.mark.parametrize("parallelism", PARALLELISMS)
def test_each_element_lies_where_its_extent_says(parallelism: str) -> None:
    whole = {name: value.detach() for name, value in named_parameters(model()).items()}
    seen: dict[str, set[Extent]] = {name: set() for name in whole}
    for number in range(RANKS):
        with rank(number) as mesh:
            module = PARALLELISMS[parallelism](model(), mesh)
            extents = parameter_extents(module)
            for parameter, (name, tensor) in zip(module.parameters(), whole.items(), strict=True):
                extent = extents[id(parameter)]
                part = local_part(parameter).reshape(-1)
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
    for name, parts in seen.items():
        assert sum(part.numel for part in parts) == whole[name].numel(), name
        assert len(parts) > 1 or parallelism in ("none", "fsdp1 without shards", "tp")


def test_a_tensor_without_dimensions_has_one_place() -> None:
    extent = extent_of(torch.tensor(3.0))
    assert (extent.global_index(0), extent.take(torch.tensor(7.0)).tolist()) == ([], [7.0])
    one = torch.tensor(3.0)
    extent.put(one, torch.tensor([7.0]))
    assert one.item() == 7.0


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("numel", [0, 1, 4, 6])
def test_a_part_is_put_where_it_lies_in_a_box(numel: int, strided: bool) -> None:
    """A flat piece of two of the three columns, in a tensor that lies transposed or not."""
    tensor = torch.zeros(3, 3).t() if strided else torch.zeros(3, 3)
    extent = Extent((3, 3), (0, 1), (3, 2), min(1, 6 - numel), numel)
    extent.put(tensor, torch.arange(1.0, numel + 1))
    assert extent.take(tensor).tolist() == [*range(1, numel + 1)]
    assert int((tensor != 0).sum()) == numel
    assert tensor[:, 0].tolist() == [0.0] * 3


@pytest.mark.parametrize("extent", [Extent((2, 3), (0,), (2, 3), 0, 6), Extent((2, 3), (0, 0), (2,), 0, 2)])
def test_an_extent_that_is_none_is_an_error(extent: Extent) -> None:
    with pytest.raises(ValueError, match=r"zip\(\) argument"):
        extent.take(torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"zip\(\) argument"):
        extent.global_index(1)
