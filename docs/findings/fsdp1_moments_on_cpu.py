"""Adam's state of an FSDP1 model on CPUs, as `FSDP.optim_state_dict` returns it with offload_to_cpu, the
default, and without: are the two moments of a parameter different tensors?

torchrun --nproc-per-node 2 fsdp1_moments_on_cpu.py
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    StateDictType,
)

dist.init_process_group("gloo")
torch.manual_seed(0)
model = FullyShardedDataParallel(torch.nn.Linear(4, 2), use_orig_params=True, device_id=torch.device("cpu"))
optimizer = torch.optim.Adam(model.parameters())
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
wrong = False
for offload in (True, False):
    kinds = FullStateDictConfig(), FullOptimStateDictConfig(offload_to_cpu=offload)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, *kinds):
        state = FullyShardedDataParallel.optim_state_dict(model, optimizer)["state"]["weight"]
    wrong |= torch.equal(state["exp_avg"], state["exp_avg_sq"])
    if dist.get_rank() == 0:
        print(f"torch {torch.__version__}, offload_to_cpu={offload}")
        for name in ("exp_avg", "exp_avg_sq"):
            print(f"  {name}: {state[name].flatten()[0].item():.4f}")
dist.destroy_process_group()
sys.exit(wrong)
