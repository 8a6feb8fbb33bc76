"""Exchanges of training results between ranks."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from dcpbench.workloads.world import World
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
