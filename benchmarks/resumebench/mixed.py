"""Mixed precision with a GradScaler and dropout, on a GPU where there is one."""

import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Model(nn.Sequential):
    """Layers whose activations are computed again in the backward pass."""

    def forward(self, batch):
        """Return the values for a batch."""
        return checkpoint(self[1], self[0](batch), use_reentrant=False)


os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
torch.use_deterministic_algorithms(True)
out, mistake = Path(sys.argv[1]), "".join(sys.argv[2:])
device = "cuda" if torch.cuda.is_available() else "cpu"
generator = torch.cuda if device == "cuda" else torch
half = torch.float16 if device == "cuda" else torch.bfloat16
torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(32, 4)
model = Model(*layers).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
scaler = torch.amp.GradScaler(device, init_scale=1024.0, growth_interval=5)
step = 0
for path in sorted(out.glob("step-??.pt"), reverse=True)[:1]:
    state = torch.load(path, map_location="cpu")
    model.load_state_dict(state["model"])
    if mistake != "no_optimizer":
        optimizer.load_state_dict(state["optimizer"])
    scaler.load_state_dict(state["scaler"])
    if mistake != "no_generator":
        generator.set_rng_state(state["generator"])
    step = state["step"]

while step < 12:
    batch = torch.randn(8, 6, 32, generator=torch.Generator().manual_seed(step)).to(device)
    with torch.autocast(device, half):
        loss = (model(batch) - batch[..., :4]).pow(2).mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    step += 1
    if step % 4 == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        state |= {"scaler": scaler.state_dict(), "generator": generator.get_rng_state()}
        torch.save(state, out / f"step-{step:02}.tmp")
        (out / f"step-{step:02}.tmp").rename(out / f"step-{step:02}.pt")
