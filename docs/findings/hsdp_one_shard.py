"""FSDP1's HYBRID_SHARD over shard groups of one rank trains replicas that never meet.

    torchrun --nproc-per-node 2 hsdp_one_shard.py

Wraps one model on a 2-D mesh (dp_replicate=2, dp_shard=1), by FSDP1 and by fully_shard, gives each rank
other inputs and trains one step. Prints for each wrapper how far the replicas' weights are from each other
afterwards. Exit status 1 if they are not the same.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor


def build(wrap: str, mesh: DeviceMesh, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Linear(8, 8).to(device)
    if wrap == "fully_shard":
        fully_shard(model, mesh=mesh)
        return model
    hybrid = ShardingStrategy.HYBRID_SHARD
    return FullyShardedDataParallel(
        model, device_mesh=mesh, sharding_strategy=hybrid, use_orig_params=True, device_id=device
    )


def weights(model: nn.Module) -> torch.Tensor:
    parts = [one.to_local() if isinstance(one, DTensor) else one for one in model.parameters()]
    return torch.cat([part.detach().reshape(-1) for part in parts])


def main() -> int:
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    mesh = init_device_mesh(device.type, (2, 1), mesh_dim_names=("dp_replicate", "dp_shard"))

    drifted = False
    for wrap in ("HYBRID_SHARD", "fully_shard"):
        model = build(wrap, mesh, device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        inputs = torch.full((4, 8), float(dist.get_rank() + 1), device=device)
        model(inputs).square().mean().backward()
        optimizer.step()
        mine = weights(model)
        replicas = [torch.empty_like(mine) for _ in range(2)]
        dist.all_gather(replicas, mine)
        apart = (replicas[0] - replicas[1]).abs().max().item()
        drifted |= apart > 0
        if dist.get_rank() == 0:
            print(f"{wrap} 2 x 1, torch {torch.__version__}, {device.type}")
            print(f"  replicas after one step: {f'apart by {apart:.3g}' if apart else 'the same bits'}")
    dist.destroy_process_group()
    return int(drifted)


if __name__ == "__main__":
    sys.exit(main())
