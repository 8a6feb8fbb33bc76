"""FSDP1 without use_orig_params has no optimizer state where its group lacks rank 0.

    torchrun --nproc-per-node 4 flat_fsdp1_groups.py

Wraps a model in FullyShardedDataParallel over pairs of ranks, 0 and 2, 1 and 3, as they are below tensor
parallelism, takes a step and asks for the optimizer's state dict; with and without use_orig_params. Exit
status 1 if it raised on any rank.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel


def state_of(use_orig_params: bool, device: torch.device) -> str:
    torch.manual_seed(0)
    mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("dp", "tp"))
    model = FullyShardedDataParallel(
        nn.Linear(8, 8, device=device),
        device_mesh=mesh["dp"],
        use_orig_params=use_orig_params,
        device_id=device,
    )
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(4, 8, device=device)).sum().backward()
    optimizer.step()
    try:
        get_optimizer_state_dict(model, optimizer)
    except ValueError as error:
        return f"ValueError: {str(error).partition(' <')[0]}"
    return "its state"


def main() -> int:
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    raised = False
    for use_orig_params in (True, False):
        results: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(results, state_of(use_orig_params, device))
        raised |= any("Error" in one for one in results)
        if dist.get_rank() == 0:
            print(f"torch {torch.__version__}, use_orig_params={use_orig_params}")
            for rank, one in enumerate(results):
                print(f"  rank {rank}: {one}")
    dist.destroy_process_group()
    return int(raised)


if __name__ == "__main__":
    sys.exit(main())
