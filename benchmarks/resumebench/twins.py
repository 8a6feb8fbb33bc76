"""Two networks whose parameters have equal names, each with an optimizer, or with one for both. Words choose
which are trained when, so that a resume calls them in another order, and mistakes."""

import sys
from pathlib import Path

import torch
from torch import nn

out, words = Path(sys.argv[1]), {*sys.argv[2:]}
torch.manual_seed(0)
nets = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)) for _ in range(2)]
if "one" in words:
    optimizers = [torch.optim.Adam([*nets[0].parameters(), *nets[1].parameters()], 0.02)]
else:
    optimizers = [torch.optim.Adam(net.parameters(), 0.02) for net in nets]
average, seen = torch.zeros(4), [{"batches": 0} for _ in nets]
step, path = 0, out / "last.pt"
if path.exists():
    state = torch.load(path)
    for net, saved in zip(nets, state["nets"][:: -1 if "swapped" in words else 1], strict=True):
        net.load_state_dict(saved)
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        if "no_optimizer" not in words:
            optimizer.load_state_dict(saved)
    if "wrong_entry" in words:  # of the one that is not trained
        nets[1].load_state_dict(state["nets"][0])
    if "no_buffers" in words:
        nets[1][1].reset_running_stats()
    if "no_average" not in words:
        average = state["average"]
    if "no_seen" not in words:
        seen = state["seen"]
    step = state["step"]
while step < 18:
    turn = int(step >= 9) if "stages" in words else 0 if "teacher" in words else step % 2
    batch = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))
    target = nets[1](batch) if "teacher" in words else batch.roll(turn + 1, 1)
    loss = (nets[turn](batch) - target).pow(2).mean()
    optimizer = optimizers[turn % len(optimizers)]
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    average = average.lerp(batch.mean(0), 0.1)
    seen[turn]["batches"] += 1
    step += 1
    if step % (9 if "at_switch" in words else 5) == 0:
        state = {"nets": [net.state_dict() for net in nets], "step": step, "average": average, "seen": seen}
        state |= {"optimizers": [optimizer.state_dict() for optimizer in optimizers]}
        torch.save(state, out / "part.tmp")
        (out / "part.tmp").replace(path)
