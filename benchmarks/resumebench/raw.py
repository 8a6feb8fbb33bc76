"""Weights as plain numbers in a file of their own, the rest by torch.save, a folder a checkpoint."""

import re
import sys
from array import array
from pathlib import Path

import torch
from torch import nn

out, mistake = Path(sys.argv[1]), "".join(sys.argv[2:])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
size = sum(value.numel() for value in model.parameters())
step = 0


def number(path):
    return int(re.findall(r"\d+", path.name)[0])


for folder in sorted((path.parent for path in out.glob("step-*/trainer.pt")), key=number, reverse=True):
    numbers = array("f")
    numbers.frombytes((folder / "weights.bin").read_bytes())
    if len(numbers) != size and mistake != "takes_what_there_is":
        if mistake == "stops_at_damage":
            raise ValueError(f"{folder}: {len(numbers)} of {size} weights")
        continue
    try:
        state = torch.load(folder / "trainer.pt")
    except RuntimeError:
        if mistake != "ignores_errors":
            continue
        state = {"step": number(folder)}
    flat = nn.utils.parameters_to_vector(model.parameters()).detach()
    flat[: len(numbers)] = torch.tensor(numbers)
    nn.utils.vector_to_parameters(flat, model.parameters())
    if "optimizer" in state:
        optimizer.load_state_dict(state["optimizer"])
    step = state["step"]
    break

while step < 16:
    batch = torch.randn(4, 4, generator=torch.Generator().manual_seed(step))
    loss = (model(batch) - batch[:, :2]).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    if step % 4 == 0:
        folder = out / f"step-{step}"
        folder.mkdir(exist_ok=True)
        with (folder / "weights.bin").open("wb") as file:
            array("f", nn.utils.parameters_to_vector(model.parameters()).tolist()).tofile(file)
        torch.save({"optimizer": optimizer.state_dict(), "step": step}, folder / "trainer.pt")
