"""A plain loop. Words choose what differs between its runs, what does not change, and mistakes."""

import os
import sys
from pathlib import Path

import numpy
import torch
from torch import nn

out, words = Path(sys.argv[1]), {*sys.argv[2:]}
if "unseeded" not in words:
    torch.manual_seed(0)
    numpy.random.seed(0)


class Held(nn.Module):
    """A model that holds its data, and gets the number of a step."""

    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, place):
        """Return the values for a row of the data."""
        return self.layers(data[place % 12])


data = torch.randn(12, 6, 4, generator=torch.Generator().manual_seed(1))
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 2))
if "holds_data" in words:
    model = Held(model)
rate = 0.0 if "never_changes" in words else 0.02
parts = [model[0], model[3]] if "two" in words else [model]
optimizers = [torch.optim.Adam(part.parameters(), rate) for part in parts]
if "counts" in words:  # as an attribute, which no state dict has
    optimizers[0].count = 0

    def later(*_):
        """Regularize more with each step."""
        optimizers[0].count += 1
        with torch.no_grad():
            model[0].weight.mul_(1 - 0.01 * optimizers[0].count)

    optimizers[0].register_step_post_hook(later)
step, path = 0, out / "last.pt"
order, own = torch.randperm(12), numpy.random.default_rng()
if path.exists():
    state = torch.load(path)
    model.load_state_dict(state["model"])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        if "no_optimizer" not in words:
            optimizer.load_state_dict(saved)
    if "no_generator" not in words:
        torch.set_rng_state(state["generator"])
    if "keeps_numpy" in words:
        kind, key, *rest = numpy.random.get_state()
        numpy.random.set_state((kind, state["numpy"].numpy(), *state["numpy_rest"]))
    if "draws_first" in words:
        numpy.random.rand()
    order, step = state["order"], state["step"]
begun = step if "starts_over" in words else 0
while step < 18:
    if (step - begun) % 12 == 0:
        order = torch.randperm(12)
    place = 0 if "one_batch" in words else int(order[(step - begun) % 12])
    shift = own.normal() if "own_generator" in words else 0.0
    outputs = model(place if "holds_data" in words else data[place] + shift)
    model.zero_grad()
    if "holds_data" in words:  # the gradient of the loss by hand, so that no number is the loss
        outputs.backward(2 * outputs.detach() / outputs.numel())
    else:
        target = data[place][:, :2]
        if "labels" in words:
            target = target[torch.from_numpy(numpy.random.permutation(6))]
        (outputs - target).pow(2).mean().backward()
    if "noise" in words:  # as of kernels that add in any order
        for parameter in model.parameters():
            parameter.grad += 1e-6 * int.from_bytes(os.urandom(1), "big")
    turn = int(step >= 9) if "stages" in words else step % 2
    for optimizer in [optimizers[turn]] if {"stages", "alternates"} & words else optimizers:
        optimizer.step()
    step += 1
    if step % 5 == 0:
        state = {"model": model.state_dict(), "step": step}
        state |= {"optimizers": [optimizer.state_dict() for optimizer in optimizers]}
        state |= {"order": order, "generator": torch.get_rng_state()}
        if "keeps_numpy" in words:
            kind, key, *rest = numpy.random.get_state()
            state |= {"numpy": torch.from_numpy(key.copy()), "numpy_rest": rest}
        torch.save(state, out / "part.tmp")
        (out / "part.tmp").replace(path)
