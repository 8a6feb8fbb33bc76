"""torchdata's StatefulDataLoader: its position and that of its workers are saved, two epochs and more."""

import sys
from pathlib import Path

import torch
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader

out, mistake = Path(sys.argv[1]), "".join(sys.argv[2:])
torch.manual_seed(0)


class Stream(torch.utils.data.IterableDataset):
    """Numbers of a generator that remembers where it is, unless that is forgotten."""

    def __init__(self):
        self.number = 0

    def __iter__(self):
        while self.number < 40:
            self.number += 1
            yield torch.randn(4, generator=torch.Generator().manual_seed(self.number))
        self.number = 0

    def state_dict(self):
        return {"number": self.number}

    def load_state_dict(self, state):
        if mistake != "stream_forgets":
            self.number = state["number"]


data = torch.randn(40, 4)
streams = mistake in ("streams", "stream_forgets")
loader = StatefulDataLoader(
    Stream() if streams else data,
    batch_size=4,
    shuffle=None if streams else True,
    generator=torch.Generator().manual_seed(1) if mistake == "own_generator" else None,
    num_workers=2 if mistake == "workers" else 0,
)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
step = 0
for path in sorted(out.glob("step-??.pt"), reverse=True)[:1]:
    state = torch.load(path, weights_only=False)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    if mistake != "loader_not_restored":
        loader.load_state_dict(state["loader"])
    torch.set_rng_state(state["generator"])
    step = state["step"]

while step < 24:
    for batch in loader:
        loss = (model(batch) - batch.sum(1, keepdim=True)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % 6 == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            state |= {"loader": loader.state_dict(), "generator": torch.get_rng_state()}
            part = out / "saving.part"
            torch.save(state, part)
            part.rename(out / f"step-{step:02}.pt")
        if step == 24:
            break
