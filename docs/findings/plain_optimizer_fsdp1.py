"""An optimizer as it is in the state that DCP saves and loads: under FSDP1, and under fully_shard.

torchrun --nproc-per-node 2 plain_optimizer_fsdp1.py
"""

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard


def trained(kind: str, steps: int) -> torch.optim.Optimizer:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if kind == "FSDP1":
        model = FullyShardedDataParallel(
            model, device_mesh=mesh, use_orig_params=True, device_id=torch.device("cpu")
        )
    else:
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(steps):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


dist.init_process_group("gloo")
places = [tempfile.mkdtemp() for _ in range(2)]
dist.broadcast_object_list(places)
if not dist.get_rank():
    print(f"torch {torch.__version__}")
refused = False
for kind, place in zip(("fully_shard", "FSDP1"), places, strict=True):
    dcp.save({"optimizer": trained(kind, 3)}, checkpoint_id=place)
    held = FileSystemReader(place).read_metadata().state_dict_metadata["optimizer.state.0.exp_avg"]
    told = f"the first weight, of (4, 3), is saved as {tuple(held.size)}"
    try:
        dcp.load({"optimizer": trained(kind, 1)}, checkpoint_id=place)
        told += ", and loaded"
    except CheckpointException as error:
        refused = True
        told += f"; the load: {str(error).strip().splitlines()[-1]}"
    if not dist.get_rank():
        print(f"  {kind}: {told}")
dist.destroy_process_group()
sys.exit(refused)
