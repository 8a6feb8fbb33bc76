"""Exchanges of training results between ranks."""

import re
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from dcpbench.scenarios.dcp_api import sub_groups
from dcpbench.workloads import parallelisms
from dcpbench.workloads import world as world_module
from dcpbench.workloads.world import COLLECTIVE_TIMEOUT, World
from support.alone import bare_cell, config
from support.gloo_ranks import Ask


def mean_of_ranks(device: str, has_training_group: bool) -> tuple[float, str]:
    """Return the mean of the ranks' numbers, and the group that computed it."""
    groups = {name: dist.new_group(backend="gloo") for name in ("checkpoint", "own", "training")}
    training: Any = groups["training"] if has_training_group else None
    rank, size = dist.get_rank(), dist.get_world_size()
    own: Any = (groups["checkpoint"], groups["own"])
    world = World(rank, size, torch.device(device), *own, training)
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as called:
        values = [torch.tensor(float(rank)), torch.tensor([2.0]), torch.tensor(float(rank))]
        mean, other, weighted = world.means(values, [8, 8, rank + 1])
    assert (other, weighted) == (2.0, 2.0)
    ((tensor,), options) = called.call_args
    assert tensor.device.type == "cpu"
    return mean, next(name for name, group in groups.items() if group is options["group"])


@pytest.mark.parametrize(
    ("device", "has_training_group", "carried_by"), [("cuda", False, "own"), ("cpu", True, "training")]
)
def test_losses_are_averaged_by_gloo(
    ask: Ask, device: str, has_training_group: bool, carried_by: str
) -> None:
    assert set(ask(mean_of_ranks, device, has_training_group)) == {(1.5, carried_by)}


def timeouts() -> set[timedelta]:
    """Return the time limits of the groups of a save in a slot, of meshes, and of half the ranks."""
    c10d = dist.distributed_c10d
    known = {*c10d._world.pg_map}
    group: Any = dist.group.WORLD
    world = World(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), group, group)
    world.group_of(1)
    world.mesh({"dp_replicate": 2, "dp_shard": 2})
    sizes = {"dp_shard": 2, "ep": 2}
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    parallelisms.expert_parallel(model, world.mesh(sizes), config(parallel="fsdp2_ep").parallel)  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory() as folder:
        sub_groups._half(bare_cell(Path(folder), seen_by=world))
        made = [one for one in c10d._world.pg_map if one not in known]
        assert len(made) >= 6
        return {one._get_backend(torch.device("cpu")).options._timeout for one in made}


def test_all_groups_have_the_time_limit_of_collectives(ask: Ask) -> None:
    assert ask(timeouts) == [{COLLECTIVE_TIMEOUT}] * 4


def test_groups_are_made_in_one_place() -> None:
    """Where they get their time limit."""
    folder = Path(world_module.__file__).parents[1]
    calls = re.compile(r"dist\.new_group\(|init_device_mesh\(|(?<!with_timeout\(mesh)\._flatten\(")
    makes = {path for path in folder.rglob("*.py") if calls.search(path.read_text())}
    assert makes == {Path(world_module.__file__)}
