"""The optimizer of a model under `fully_shard`, saved and loaded after an evaluation.

python optimizer_after_evaluation.py
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard


def evaluated() -> tuple[nn.Module, torch.optim.Optimizer, dict]:
    """A model that was trained and then evaluated, its optimizer, and the state of that before."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.rand(3, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    state = get_optimizer_state_dict(model, optimizer)
    with torch.no_grad():
        model(torch.rand(3, 4))
    return model, optimizer, state


def main() -> int:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    print(f"torch {torch.__version__}")
    wrong = 0
    for about, do in {
        "get": lambda model, optimizer, _: get_optimizer_state_dict(model, optimizer),
        "set": set_optimizer_state_dict,
        "get, the model's first": lambda model, optimizer, _: (
            get_model_state_dict(model),
            get_optimizer_state_dict(model, optimizer),
        ),
    }.items():
        try:
            do(*evaluated())
            print(f"  {about}: done")
        except KeyError as error:
            wrong += 1
            print(f"  {about}: KeyError: {' '.join(str(error).split())[:40]}")
    dist.destroy_process_group()
    return wrong


if __name__ == "__main__":
    sys.exit(main())
