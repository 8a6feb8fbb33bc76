"""Trains 16 steps, and resumes without its position in the data."""

import sys
from pathlib import Path

import torch
from torch import nn

out = Path(sys.argv[sys.argv.index("--out") + 1])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
batches, first = torch.randn(16, 8, 4), 0
for path in sorted(out.glob("step-??.pt"))[-1:]:
    state = torch.load(path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    first = state["step"]

loader = iter(batches)
for step in range(first + 1, 17):
    loss = model(next(loader)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 4 == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, out / "new")
        (out / "new").rename(out / f"step-{step:02}.pt")
