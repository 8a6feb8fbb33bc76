"""Running statistics of ranks that saw other data, saved and loaded by DCP.

torchrun --nproc-per-node 2 buffers_of_some_rank.py
"""

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.nn.parallel import DistributedDataParallel


def build() -> DistributedDataParallel:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    return DistributedDataParallel(layers)


def main() -> int:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = build()
    torch.manual_seed(1 + rank)
    for _ in range(2):
        model(torch.rand(8, 4) + rank).sum().backward()
    saved = {name: value.clone() for name, value in model.module.named_buffers() if "running" in name}
    everybody: list = [None, None]
    dist.all_gather_object(everybody, saved)

    wrong = 0
    if rank == 0:
        print(f"torch {torch.__version__}")
    for lowest in (False, True):
        folder = [tempfile.mkdtemp()]
        dist.broadcast_object_list(folder)
        planner = dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=lowest)
        dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=folder[0], planner=planner)
        loaded = build()
        state = {"model": get_model_state_dict(loaded)}
        dcp.load(state, checkpoint_id=folder[0])
        set_model_state_dict(loaded, state["model"])
        if rank == 0:
            print(f"  dedup_save_to_lowest_rank={lowest}")
            for name, value in loaded.module.named_buffers():
                if name in saved:
                    of = [other for other, each in enumerate(everybody) if torch.equal(each[name], value)]
                    print(f"    {name}: what rank {of} had")
                    wrong += of != [0]
    dist.destroy_process_group()
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
