"""The state dict of a model with a submodule under two names, set again: plain, and under DDP.

python module_under_two_names.py
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.nn.parallel import DistributedDataParallel


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(2, 2)
        self.decoder = self.encoder

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.encoder(x))


def set_again(model: nn.Module) -> str:
    state = get_model_state_dict(model)
    try:
        set_model_state_dict(model, state)
    except RuntimeError as error:
        return " ".join(str(error).split())
    return f"set, {len(state)} tensors"


print(f"torch {torch.__version__}")
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
results = [set_again(model) for model in (Tied(), DistributedDataParallel(Tied()), torch.compile(Tied()))]
for kind, result in zip(("plain", "DDP", "compiled"), results, strict=True):
    print(f"  {kind}: {result}")
dist.destroy_process_group()
sys.exit(not all(result.startswith("set") for result in results))
