"""Workloads of code that was written for torchrun, and reads its variables when it is imported."""

import os

import torch.distributed as dist

from dcpbench.workloads.workload import Workload
from support.ordinary_workloads import inputs, net, reversed_loss

NUMBERS = {
    name: int(os.environ[name])
    for name in ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT")
}
RANK, SIZE = dist.get_rank(), dist.get_world_size()


def build() -> Workload:
    """Check the variables, of which one is the same on all ranks."""
    port = NUMBERS["MASTER_PORT"]
    of_rank = {"RANK": RANK, "LOCAL_RANK": RANK, "GROUP_RANK": 0}
    assert {**of_rank, "WORLD_SIZE": SIZE, "LOCAL_WORLD_SIZE": SIZE, "MASTER_PORT": port} == NUMBERS
    assert dist.get_node_local_rank() == RANK
    assert dist.is_torchelastic_launched()
    ports: list[int | None] = [None] * SIZE
    dist.all_gather_object(ports, port)
    assert {*ports} == {port}
    return Workload(net(), inputs, reversed_loss)


def begins_a_group() -> Workload:
    dist.init_process_group("gloo")
    return build()
