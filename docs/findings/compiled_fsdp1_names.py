"""Under torch.compile and FSDP1, optimizer state cannot be set if one parameter's name is part of another's.

    torchrun --nproc-per-node 2 compiled_fsdp1_names.py

Builds a model of two linear layers, wraps it in FullyShardedDataParallel, compiles it, takes a step, and
sets the optimizer's state dict straight back. Once the layers are called "body" and "head", once
"lm_head" and "head", once the latter without compiling. Exit status 1 if any of the three raised.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel


class Net(nn.Module):
    def __init__(self, first: str, second: str) -> None:
        super().__init__()
        self.add_module(first, nn.Linear(8, 8))
        self.add_module(second, nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.children():
            x = layer(x)
        return x


def get_and_set(first: str, second: str, compiled: bool, device: torch.device) -> str:
    torch.manual_seed(0)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    model: nn.Module = FullyShardedDataParallel(
        Net(first, second).to(device), device_mesh=mesh, use_orig_params=True, device_id=device
    )
    if compiled:
        model = torch.compile(model, backend="eager")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model(torch.ones(4, 8, device=device)).sum().backward()
    optimizer.step()
    try:
        set_optimizer_state_dict(model, optimizer, get_optimizer_state_dict(model, optimizer))
    except KeyError as error:
        return f"KeyError: {error}"
    return "set"


def main() -> int:
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    raised = False
    for first, second, compiled in (
        ("body", "head", True),
        ("lm_head", "head", True),
        ("lm_head", "head", False),
    ):
        result = get_and_set(first, second, compiled, device)
        raised |= result != "set"
        if dist.get_rank() == 0:
            print(f"torch {torch.__version__}, {first} and {second}, compiled {compiled}: {result}")
    dist.destroy_process_group()
    return int(raised)


if __name__ == "__main__":
    sys.exit(main())
