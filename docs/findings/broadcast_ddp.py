"""The whole state dict of a model on every rank, set with `broadcast_from_rank0`: under DDP, and plain.

torchrun --nproc-per-node 2 broadcast_ddp.py
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.nn.parallel import DistributedDataParallel

OPTIONS = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def set_again(model: nn.Module) -> str:
    state = get_model_state_dict(model, options=OPTIONS)
    try:
        set_model_state_dict(model, state, options=OPTIONS)
    except RuntimeError as error:
        return " ".join(str(error).split())
    return f"set, {len(state)} tensors"


dist.init_process_group("gloo")
if not dist.get_rank():
    print(f"torch {torch.__version__}")
wrong = False
for kind, model in (("a plain model", nn.Linear(2, 2)), ("DDP", DistributedDataParallel(nn.Linear(2, 2)))):
    told = [""] * dist.get_world_size()
    dist.all_gather_object(told, set_again(model))
    wrong |= not all(one.startswith("set") for one in told)
    if not dist.get_rank():
        print(*(f"  {kind}, rank {rank}: {one}" for rank, one in enumerate(told)), sep="\n")
dist.destroy_process_group()
sys.exit(wrong)
