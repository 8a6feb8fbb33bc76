"""Two optimizers of one model, the weights' and the biases', asked for their state: under FSDP1, and under
fully_shard.

torchrun --nproc-per-node 2 several_optimizers_fsdp1.py
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard


def asked(kind: str) -> str:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if kind == "FSDP1":
        model = FullyShardedDataParallel(
            model, device_mesh=mesh, use_orig_params=True, device_id=torch.device("cpu")
        )
    else:
        fully_shard(model, mesh=mesh)
    named = list(model.named_parameters())
    adam = torch.optim.Adam([one for name, one in named if name.endswith("weight")])
    sgd = torch.optim.SGD([one for name, one in named if name.endswith("bias")], lr=0.1, momentum=0.9)
    model(torch.ones(1, 3)).sum().backward()
    adam.step()
    sgd.step()
    held = get_optimizer_state_dict(model, [adam, sgd])
    return f"state of {', '.join(sorted(held['state']))}"


dist.init_process_group("gloo")
if not dist.get_rank():
    print(f"torch {torch.__version__}")
refused = False
for kind in ("fully_shard", "FSDP1"):
    try:
        told = asked(kind)
    except RuntimeError as error:
        refused, told = True, f"RuntimeError: {error}"
    if not dist.get_rank():
        print(f"  {kind}: {told}")
dist.destroy_process_group()
sys.exit(refused)
