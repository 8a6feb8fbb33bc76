"""What scripts do around their saves: a thread, SIGTERM, accumulated gradients, a step before the load."""

import copy
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
from torch import nn

out, *words = sys.argv[1:]
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=14)
path = Path(out, "last.pt")
micro, period = 0, 5 if "between" in words else 8
is_ending = threading.Event()
if "sigterm" in words:
    signal.signal(signal.SIGTERM, lambda *_: is_ending.set())
writer = threading.Thread()


def write(state: dict) -> None:
    """Write a state, then publish it."""
    time.sleep(0.04 if "thread" in words else 0)
    torch.save(state, path.with_suffix(".part"))
    os.replace(path.with_suffix(".part"), path)


if path.exists():
    if "fake_step" in words:  # it creates the optimizer's state, into which DCP can load
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
    state = torch.load(path)
    model.load_state_dict(state["model"])
    if "no_optimizer" not in words:
        optimizer.load_state_dict(state["optimizer"])
    if "no_schedule" not in words:
        schedule.load_state_dict(state["schedule"])
    if "no_gradients" not in words:
        for parameter, gradient in zip(model.parameters(), state["gradients"], strict=True):
            parameter.grad = gradient
    micro = state["micro"]
while micro < 28 and not (is_ending.is_set() and micro % 2 == 0):
    batch = torch.randn(6, 4, generator=torch.Generator().manual_seed(micro))
    model(batch).pow(2).mean().backward()
    time.sleep(0.02 if "thread" in words else 0)
    micro += 1
    if micro % 2 == 0:
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    if micro % period == 0 or (is_ending.is_set() and micro % 2 == 0):
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "micro": micro}
        state |= {"schedule": schedule.state_dict()}
        state |= {"gradients": [parameter.grad for parameter in model.parameters()]}
        if writer.ident:
            writer.join()
        if "thread" in words:
            writer = threading.Thread(target=write, args=[copy.deepcopy(state)])
            writer.start()
        else:
            write(state)
if writer.ident:
    writer.join()
