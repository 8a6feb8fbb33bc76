"""The optimizer's state of a parameter in channels_last, saved and loaded under FSDP1.

torchrun --nproc-per-node 2 fsdp1_memory_order.py
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel


def loaded_differs(memory_format: torch.memory_format) -> bool:
    """Train a step, and set the optimizer's own state dict. Return whether a moment has other values then."""
    torch.manual_seed(0)
    plain = nn.Conv2d(4, 8, 3).to(memory_format=memory_format)
    mesh, device = init_device_mesh("cpu", (2,)), torch.device("cpu")
    model = FullyShardedDataParallel(plain, device_mesh=mesh, use_orig_params=True, device_id=device)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.rand(2, 4, 5, 5)).square().mean().backward()
    optimizer.step()
    before = [state["exp_avg"].clone() for state in optimizer.state.values()]
    set_optimizer_state_dict(model, optimizer, get_optimizer_state_dict(model, optimizer))
    after = [state["exp_avg"] for state in optimizer.state.values()]
    differs = any(not torch.equal(*each) for each in zip(before, after, strict=True))
    everywhere: list[bool] = [False] * dist.get_world_size()
    dist.all_gather_object(everywhere, differs)
    return any(everywhere)


def main() -> int:
    dist.init_process_group("gloo")
    wrong = {name: loaded_differs(getattr(torch, name)) for name in ("contiguous_format", "channels_last")}
    if dist.get_rank() == 0:
        print(f"torch {torch.__version__}")
        for name, differs in wrong.items():
            print(f"  {name}: exp_avg is {'another' if differs else 'the same'} after the load")
    dist.destroy_process_group()
    return int(any(wrong.values()))


if __name__ == "__main__":
    sys.exit(main())
