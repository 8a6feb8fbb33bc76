"""Compiled: a module, a module in place, a function that has the model in it, or the optimizer's step."""

import sys
from pathlib import Path

import torch
from torch import nn

out, way, mistake = Path(sys.argv[1]), sys.argv[2], "".join(sys.argv[3:])
torch.manual_seed(0)
plain = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Dropout(0.1), nn.Linear(8, 1))
model = torch.compile(plain, backend="aot_eager") if way == "module" else plain
if way == "in_place":
    model.compile(backend="aot_eager")
optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01))
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 10)


def loss_of(batch):
    """Return the loss of a batch."""
    return (model(batch) - batch.sum(1, keepdim=True)).pow(2).mean()


make_step = optimizer.step
if way == "function":
    loss_of = torch.compile(loss_of, backend="aot_eager")
if way == "optimizer":
    make_step = torch.compile(optimizer.step, backend="aot_eager")
step = 0
for path in sorted(out.glob("step-??.pt"), reverse=True)[:1]:
    state = torch.load(path)
    if mistake == "prefix_is_swallowed":  # saved with "_orig_mod." in each key
        plain.load_state_dict(state["model"], strict=False)
    else:
        model.load_state_dict(state["model"])
    if mistake != "no_optimizer":
        optimizer.load_state_dict(state["optimizer"])
    if mistake != "no_schedule":
        schedule.load_state_dict(state["schedule"])
    step = state["step"]

while step < 12:
    torch.manual_seed(step)
    loss = loss_of(torch.randn(8, 4))
    optimizer.zero_grad()
    loss.backward()
    make_step()
    schedule.step()
    step += 1
    if step % 3 == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state | {"schedule": schedule.state_dict()}, out / "saving.part")
        (out / "saving.part").rename(out / f"step-{step:02}.pt")
