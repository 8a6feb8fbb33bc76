"""AdamW and SGD without momentum, whose state dict is set again: SGD alone, and beside AdamW.

python stateless_optimizer.py
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import SGD, AdamW


def set_again(model: nn.Module, *optimizers: torch.optim.Optimizer) -> str:
    model(torch.ones(1, 2)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    state = get_optimizer_state_dict(model, optimizers)
    try:
        set_optimizer_state_dict(model, optimizers, state)
    except RuntimeError as error:
        return str(error)
    return f"set, state of {sorted(state['state'])}"


print(f"torch {torch.__version__}")
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
results = {
    "SGD": set_again(model, SGD(model.parameters(), 0.1)),
    "AdamW and SGD": set_again(model, AdamW(model[0].parameters()), SGD(model[1].parameters(), 0.1)),
    "with momentum": set_again(
        model, AdamW(model[0].parameters()), SGD(model[1].parameters(), 0.1, momentum=0.9)
    ),
}
for kind, result in results.items():
    print(f"  {kind}: {result}")
dist.destroy_process_group()
sys.exit(not all(result.startswith("set") for result in results.values()))
