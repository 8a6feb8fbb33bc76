"""The optimizers of two pipeline stages, saved in one checkpoint and loaded.

torchrun --nproc-per-node 2 pipeline_param_groups.py
"""

import copy
import sys
import tempfile
from collections import OrderedDict

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)


def stage(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A rank's layer, under the name that it has in the whole model, and its optimizer after a step."""
    model = nn.Sequential(OrderedDict([(f"layer{rank}", nn.Linear(4, 4))]))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.rand(3, 4)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def main() -> int:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    folders = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folders)
    wrong = 0
    for flattened in (False, True):
        options = StateDictOptions(flatten_optimizer_state_dict=flattened)
        path = f"{folders[0]}/{flattened}"
        model, optimizer = stage(rank)
        saved = copy.deepcopy(optimizer.state_dict())
        state = {"optimizer": get_optimizer_state_dict(model, optimizer, options=options)}
        dcp.save(state, checkpoint_id=path)
        model, optimizer = stage(rank)
        state = {"optimizer": get_optimizer_state_dict(model, optimizer, options=options)}
        dcp.load(state, checkpoint_id=path)
        set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)
        loaded = optimizer.state_dict()
        lost = sorted(saved["param_groups"][0].keys() - loaded["param_groups"][0].keys())
        told = [f"rank {rank}: {f'its group has lost {lost}' if lost else 'its group is whole'}"]
        try:
            optimizer.step()
            model(torch.rand(3, 4)).square().sum().backward()
            optimizer.step()
        except KeyError as error:
            told.append(f"rank {rank}: the next step: KeyError: {error}")
        everybody: list = [None, None]
        dist.all_gather_object(everybody, told)
        wrong += any(len(lines) > 1 or "lost" in lines[0] for lines in everybody)
        if rank == 0:
            print(f"torch {torch.__version__}, {'flattened' if flattened else 'by group'}", flush=True)
            for line in (line for lines in everybody for line in lines):
                print(f"  {line}", flush=True)
    dist.destroy_process_group()
    return wrong


if __name__ == "__main__":
    sys.exit(main())
