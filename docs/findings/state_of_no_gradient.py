"""A model with a layer that no batch has reached, saved and loaded by DCP.

python state_of_no_gradient.py
"""

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.ModuleDict({"used": nn.Linear(2, 2), "unused": nn.Linear(2, 2)})
    return model, torch.optim.Adam(model.parameters())


print(f"torch {torch.__version__}")
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
wrong = 0
with tempfile.TemporaryDirectory() as folder:
    model, optimizer = build()
    model["used"](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = get_optimizer_state_dict(model, optimizer)
    print(f"  saved: state of {sorted(state['state'])}")
    dcp.save({"optimizer": state}, checkpoint_id=folder)
    model, optimizer = build()
    state = get_optimizer_state_dict(model, optimizer)
    print(f"  asked for: state of {sorted(state['state'])}")
    try:
        dcp.load({"optimizer": state}, checkpoint_id=folder)
    except CheckpointException as error:
        wrong = 1
        print(f"  load: {str(error).splitlines()[-1].strip()}")
dist.destroy_process_group()
sys.exit(wrong)
