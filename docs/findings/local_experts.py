"""Experts that each rank has for itself, under the names that all ranks have for theirs, saved and loaded.

torchrun --nproc-per-node 2 local_experts.py
"""

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict


def made(value: float) -> nn.Module:
    model = nn.ModuleDict({"router": nn.Linear(1, 2), "experts": nn.ModuleList([nn.Linear(1, 1)])})
    for name, parameter in model.named_parameters():
        nn.init.constant_(parameter, value if name.startswith("experts") else 0.5)
    return model


def gathered(what: object) -> list[object]:
    told: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(told, what)
    return told


dist.init_process_group("gloo")
rank = dist.get_rank()
(place,) = gathered(tempfile.mkdtemp())[:1]
saved, new = made(1.0 + rank), made(0.0)
dcp.save({"model": get_model_state_dict(saved)}, checkpoint_id=str(place))
state = {"model": get_model_state_dict(new)}
dcp.load(state, checkpoint_id=str(place))
set_model_state_dict(new, state["model"])
had, got = (gathered(model.get_parameter("experts.0.weight").item()) for model in (saved, new))
if not rank:
    print(f"torch {torch.__version__}")
    for number, (before, after) in enumerate(zip(had, got, strict=True)):
        print(f"  rank {number}: experts.0.weight was {before} when it was saved, is {after} after the load")
dist.destroy_process_group()
sys.exit(had != got)
