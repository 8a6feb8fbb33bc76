"""Accumulation, a GradScaler, clipping, frozen layers, an average of the weights (EMA)."""

import copy
import random
import sys
from pathlib import Path

import torch
from torch import nn

out, mistake = Path(sys.argv[1]), "".join(sys.argv[2:])
torch.manual_seed(0)
random.seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
if mistake == "frozen_not_saved":
    model[0].weight.data += torch.randn(8, 4, generator=torch.Generator().manual_seed(torch.seed() % 1000))
    torch.manual_seed(1)
if mistake == "shapes":  # a call before the load shows them
    model[1] = nn.LazyBatchNorm1d()
    model(torch.rand(6, 4))
model[0].requires_grad_(False)
average = copy.deepcopy(model)
optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
micro = step = 0
target = 1.0


def unfreeze():
    """Train all layers, with a new optimizer."""
    global optimizer, schedule
    model.requires_grad_(True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)


for path in sorted(out.glob("checkpoint-??.pt"), reverse=True)[:1]:
    state = torch.load(path)
    if mistake == "unfreezes" and state["step"] > 4:
        unfreeze()
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    schedule.load_state_dict(state["schedule"])
    if mistake != "no_scaler":
        scaler.load_state_dict(state["scaler"])
    if mistake == "average_restarts":
        average = copy.deepcopy(model)
    elif mistake != "average_not_restored":
        average.load_state_dict(state["average"])
    if mistake == "loads_average":
        model.load_state_dict(state["average"])
    if mistake == "new_optimizer_after_load":
        optimizer = torch.optim.Adam(optimizer.param_groups[0]["params"], lr=0.01)
    if mistake == "lr_overridden":
        optimizer.param_groups[0]["lr"] = 0.003
    micro, step = state["micro"], state["step"]
    if mistake != "target_not_restored":
        target = state["target"]
    if mistake == "skips_a_batch":
        micro += 2
    if mistake == "one_step_more":
        step -= 1

while step < 12:
    batch = torch.randn(6, 4, generator=torch.Generator().manual_seed(micro))
    loss = (model(batch) - target).pow(2).mean() / 2
    scaler.scale(loss).backward()
    micro += 1
    step_of_save = mistake == "saves_between" and micro == 15
    if micro % 2 == 0:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        schedule.step()
        step += 1
        target *= 1.1
        with torch.no_grad():
            for mean, value in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(value, 0.1)
        if mistake == "unfreezes" and step == 4:
            unfreeze()
        step_of_save |= step % 3 == 0 and mistake != "saves_between"
    if step_of_save:
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "step": step,
            "micro": micro,
        }
        state |= {"schedule": schedule.state_dict(), "scaler": scaler.state_dict(), "target": target}
        state |= {"average": average.state_dict()}
        path = out / f"checkpoint-{step:02}.pt"
        torch.save(state, path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)
