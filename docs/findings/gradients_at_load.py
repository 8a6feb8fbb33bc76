"""An optimizer is loaded by DCP's functions into one that has never stepped, with and without gradients.

python gradients_at_load.py
"""

import sys
import tempfile
import warnings

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

warnings.filterwarnings("ignore", message="torch.distributed is")


def built() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    return model, torch.optim.Adam(model.parameters())


def backward(model: nn.Module) -> None:
    model(torch.ones(1, 2)).sum().backward()


def loaded(folder: str, gradients: bool) -> torch.optim.Optimizer:
    model, optimizer = built()
    if gradients:
        backward(model)
    state = get_optimizer_state_dict(model, optimizer)
    dcp.load({"optimizer": state}, checkpoint_id=folder, no_dist=True)
    set_optimizer_state_dict(model, optimizer, state)
    return optimizer


print(f"torch {torch.__version__}")
model, optimizer = built()
for _ in range(3):
    backward(model)
    optimizer.step()
    optimizer.zero_grad()
wrong = False
with tempfile.TemporaryDirectory() as folder:
    dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=folder, no_dist=True)
    for gradients in (False, True):
        held = loaded(folder, gradients)
        steps = [float(entries["step"]) for entries in held.state.values()]
        wrong |= steps != [3.0, 3.0]
        print(f"  {'with' if gradients else 'without'} gradients: steps of the parameters {steps}")
sys.exit(wrong)
