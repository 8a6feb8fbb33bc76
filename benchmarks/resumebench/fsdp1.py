"""FSDP1 with original or flat parameters, or mixed precision: full states in a file, or sharded by DCP."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    StateDictType,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

out, way, mistake = Path(sys.argv[1]), sys.argv[2], "".join(sys.argv[3:])
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
precision = MixedPrecision(param_dtype=torch.bfloat16) if way == "mixed" else None
model = FullyShardedDataParallel(
    model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), use_orig_params=way != "flat",
    mixed_precision=precision, device_id=torch.device("cpu"),
)  # fmt: skip
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=10)
FullyShardedDataParallel.set_state_dict_type(
    model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(),
    FullOptimStateDictConfig(offload_to_cpu=mistake == "offloads"),
)  # fmt: skip


def saved():
    """Return the state of the model and of its optimizer."""
    if way == "dcp":
        weights, moments = get_state_dict(model, optimizer)
    else:
        weights, moments = model.state_dict(), FullyShardedDataParallel.optim_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "schedule": schedule.state_dict(), "step": step}


step = 0
for path in sorted(out.glob("step-??*"), reverse=True)[:1]:
    if way == "dcp":
        state = saved()
        dcp.load(state, checkpoint_id=path)
        set_model_state_dict(model, state["model"])
        if mistake != "no_optimizer":
            set_optimizer_state_dict(model, optimizer, state["optimizer"])
    else:
        state = torch.load(path)
        model.load_state_dict(state["model"])
        moments = FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, state["optimizer"])
        if mistake != "no_optimizer":
            optimizer.load_state_dict(moments)
    if mistake != "no_schedule":
        schedule.load_state_dict(state["schedule"])
    step = state["step"] - (mistake == "one_batch_again")

while step < 12:
    inputs = torch.randn(4, 4, generator=torch.Generator().manual_seed(100 * step + rank))
    loss = model(inputs).float().pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    model.clip_grad_norm_(1.0)
    optimizer.step()
    schedule.step()
    step += 1
    if step % 3 == 0:
        state = saved()
        place = out / f"step-{step:02}"
        if way == "dcp":
            dcp.save(state, checkpoint_id=out / f"saving-{step}")
            if rank == 0:
                (out / f"saving-{step}").rename(place)
        elif rank == 0:
            torch.save(state, out / "saving.pt")
            (out / "saving.pt").rename(place.with_suffix(".pt"))
        dist.barrier()
dist.barrier()
dist.destroy_process_group()
