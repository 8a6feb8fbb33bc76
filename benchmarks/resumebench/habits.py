"""Saves in a thread, another folder, on SIGTERM, between steps; a step before the load; a root not called."""

import copy
import shutil
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
from torch import nn


class Model(nn.Module):
    """A model with a parameter of its own, that is not called itself."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        """Return the loss of a batch."""
        return self.second(self.first(batch).tanh() * self.scale).pow(2).mean()


out, *words = sys.argv[1:]
if {*out} & {*"=@:"}:
    raise ValueError(f"{out}: as a value in an override of Hydra it is refused")
torch.manual_seed(0)
model = Model()
parameters = dict(model.named_parameters())
optimizer = torch.optim.AdamW(parameters.values(), lr=0.01)
if "counts" in words:  # as an attribute, which no state dict has
    optimizer.count = 0

    def later(*_: object) -> None:
        """Regularize more with each step."""
        optimizer.count += 1
        with torch.no_grad():
            model.scale.mul_(1 - 0.01 * optimizer.count)

    optimizer.register_step_post_hook(later)
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
    with tempfile.TemporaryDirectory(dir=None if "elsewhere" in words else out) as folder:
        torch.save(state, Path(folder, "part"))
        if "backup" in words and path.exists():
            path.replace(Path(out, "previous.pt"))
        shutil.move(Path(folder, "part"), path)


if path.exists():
    if "fake_step" in words:  # it creates the optimizer's state, into which DCP can load
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
    state = torch.load(path)
    model.load_state_dict(state["model"])
    if "other_order" in words:
        parameters["scale"], parameters["first.bias"] = parameters["first.bias"], parameters["scale"]
        optimizer = torch.optim.AdamW(parameters.values(), lr=0.01)
    if "no_scale" in words:
        model.scale.data.fill_(1)
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
    model.loss(batch).backward()
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
