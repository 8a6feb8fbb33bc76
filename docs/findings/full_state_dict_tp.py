"""A model under tensor parallelism that is set from its own full state dict.

torchrun --nproc-per-node 4 full_state_dict_tp.py
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
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def build(wrap: str, rows: int, mesh: DeviceMesh) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, rows), nn.Linear(rows, 8))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    if wrap == "FSDP1":
        device = torch.device("cpu")
        return FullyShardedDataParallel(model, device_mesh=mesh["dp"], use_orig_params=True, device_id=device)
    fully_shard(model, mesh=mesh["dp"])
    return model


def main() -> int:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    if dist.get_rank() == 0:
        print(f"torch {torch.__version__}")
    wrong = 0
    for wrap in ("FSDP1", "fully_shard"):
        for rows in (8, 10):
            for broadcast in (False, True):
                options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
                model = build(wrap, rows, mesh)
                state = get_model_state_dict(model, options=options)
                said = "set"
                try:
                    set_model_state_dict(model, state, options=options)
                except (AssertionError, RuntimeError) as error:
                    said = f"{type(error).__name__}: {str(error)[:60]}"
                wrong += said != "set"
                if dist.get_rank() == 0:
                    how = "full, broadcast from rank 0" if broadcast else "full"
                    print(f"  {wrap} + TP, {rows} rows, {how}: {' '.join(said.split())}")
    dist.destroy_process_group()
    return wrong


if __name__ == "__main__":
    sys.exit(main())
