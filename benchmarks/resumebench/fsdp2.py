"""FSDP2 with DCP: sharded weights and optimizer state, a folder a checkpoint, the newest two kept."""

import re
import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

out, way, mistake = Path(sys.argv[1]), sys.argv[2], "".join(sys.argv[3:])
dist.init_process_group("gloo")
rank = dist.get_rank()
uploads = dist.new_group(backend="gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
for layer in (model[0], model[2], model[4]):
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 16)


def number(path):
    return int(re.findall(r"\d+", path.name)[0])


step = 0
complete = [path for path in out.glob("step-*") if (path / ".metadata").exists() or mistake == "takes_torn"]
if complete:
    newest = sorted(complete, key=number)[
        -2 if mistake == "takes_the_one_before" and len(complete) > 1 else -1
    ]
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "schedule": schedule.state_dict(), "step": 0}
    if mistake == "forgets_set":
        state["model"] = {key: value.clone() for key, value in weights.items()}
    if mistake == "no_optimizer":
        del state["optimizer"]
    dcp.load(state, checkpoint_id=newest)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"] if mistake != "forgets_set" else weights,
        optim_state_dict=state.get("optimizer", moments),
    )  # fmt: skip
    if mistake != "no_schedule":
        schedule.load_state_dict(state["schedule"])
    step = state["step"]

future = None
while step < 16:
    generator = torch.Generator().manual_seed(
        100 * step + (0 if mistake == "same_data" and complete else rank)
    )
    inputs = torch.randn(4, 4, generator=generator)
    loss = model(inputs).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    step += 1
    if step % 4 == 0:
        if future:
            future.result()
        for old in sorted(out.glob("step-*"), key=number)[:-1] if rank == 0 else ():
            shutil.rmtree(old)
        dist.barrier()
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments, "schedule": schedule.state_dict(), "step": step}
        place = out / f"step-{step}"
        if way == "async":
            future = dcp.async_save(state, checkpoint_id=place, process_group=uploads)
            if mistake == "step_of_next_save":
                future = None
        else:
            dcp.save(state, checkpoint_id=place)
if future:
    future.result()
dist.barrier()
dist.destroy_process_group()
