"""What an optimizer holds for a frozen parameter, saved and loaded through DCP's state-dict functions.

python state_of_frozen.py
"""

import sys
import tempfile

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def step(net: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    net(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


print(f"torch {torch.__version__}")
trained = model()
optimizer = torch.optim.Adam(trained.parameters())
step(trained, optimizer)
trained[0].requires_grad_(False)  # trained so far, and no longer
step(trained, optimizer)

resumed = model()
resumed[0].requires_grad_(False)
into = torch.optim.Adam(resumed.parameters())
with tempfile.TemporaryDirectory() as folder:
    saved = {"optimizer": get_optimizer_state_dict(trained, optimizer)}
    print("  saved for 0.weight:", sorted(saved["optimizer"]["state"]["0.weight"]))
    dcp.save(saved, checkpoint_id=folder, no_dist=True)
    dcp.load(saved, checkpoint_id=folder, no_dist=True)
set_optimizer_state_dict(resumed, into, saved["optimizer"])
restored = sorted(into.state.get(resumed[0].weight, {}))
print("  restored for 0.weight:", restored)
again = torch.optim.Adam(resumed.parameters())
again.load_state_dict(optimizer.state_dict())
print("  by the optimizer's own load_state_dict:", sorted(again.state[resumed[0].weight]))

# These have state from the start.
first, second, third = (torch.optim.Adagrad(resumed.parameters()) for _ in range(3))
set_optimizer_state_dict(resumed, second, get_optimizer_state_dict(resumed, first))
with tempfile.TemporaryDirectory() as folder:
    dcp.save({"optimizer": get_optimizer_state_dict(resumed, second)}, checkpoint_id=folder, no_dist=True)
    try:
        dcp.load({"optimizer": get_optimizer_state_dict(resumed, third)}, checkpoint_id=folder, no_dist=True)
    except CheckpointException as error:
        (failure, _) = error.failures[0]
        print("  Adagrad, restored, saved again and loaded:", failure)
sys.exit(not restored)
