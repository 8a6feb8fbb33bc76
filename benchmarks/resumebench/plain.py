"""A plain loop on one process: AdamW, a schedule, dropout, a shuffled data set, one file a checkpoint."""

import io
import re
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

out, mistake = Path(sys.argv[1]), "".join(sys.argv[2:])
torch.manual_seed(0)
data = torch.randn(48, 4)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=20)
step = 0


def name(path):
    return path.name if mistake == "sorted_as_text" else int(re.findall(r"\d+", path.name)[0])


checkpoints = [] if mistake == "never_loads" else sorted(out.glob("step-*.pt"), key=name)
if checkpoints:
    state = torch.load(checkpoints[-1])
    strict = mistake != "keys_differ"
    if mistake == "keys_differ":
        state["model"] = {f"model.{key}": value for key, value in state["model"].items()}
    if mistake == "half_of_the_keys":
        state["model"] = {key: value for key, value in state["model"].items() if not key.startswith("3.")}
        strict = False
    if mistake == "through_bfloat16":
        state["model"] = {k: v.bfloat16() if v.is_floating_point() else v for k, v in state["model"].items()}
    if mistake == "no_buffers":
        state["model"] = {k: v for k, v in state["model"].items() if "running" not in k}
        strict = False
    model.load_state_dict(state["model"], strict=strict)
    if mistake != "no_optimizer":
        optimizer.load_state_dict(state["optimizer"])
    if mistake != "no_schedule":
        schedule.load_state_dict(state["schedule"])
    if mistake == "schedule_off_by_one":
        schedule.step()
    if mistake == "stays_in_eval":
        model.eval()
    if mistake != "no_generator":
        torch.set_rng_state(state["generator"])
    if mistake != "step_not_restored":
        step = state["step"]

while step < 16:
    epoch, at = divmod(step, 6)
    seed = 0 if mistake == "epoch_not_restored" and checkpoints else epoch
    order = torch.randperm(48, generator=torch.Generator().manual_seed(seed))
    batch = data[order[8 * at : 8 * at + 8]]
    loss = (model(batch) - batch.sum(1, keepdim=True)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    step += 1
    if step % 4 == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        state |= {"schedule": schedule.state_dict(), "generator": torch.get_rng_state()}
        path = out / f"step-{step}.pt"
        if mistake == "not_atomic":
            torch.save(state, path)
        elif mistake == "saves_into_memory":  # as fsspec does, and so Lightning
            memory = io.BytesIO()
            torch.save(state, memory)
            with tempfile.NamedTemporaryFile(delete=False) as file:
                file.write(memory.getvalue())
            shutil.move(file.name, path)
        else:
            torch.save(state, path.with_suffix(".tmp"))
            path.with_suffix(".tmp").rename(path)
