"""The full state dict of a model under FSDP1 on CPUs, offloaded to the CPU.

torchrun --nproc-per-node 2 fsdp1_offload_on_cpu.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel

dist.init_process_group("gloo")
model = FullyShardedDataParallel(nn.Linear(64, 64), use_orig_params=True, device_id=torch.device("cpu"))
for offload in (False, True):
    options = StateDictOptions(full_state_dict=True, cpu_offload=offload)
    if dist.get_rank() == 0:
        print(f"torch {torch.__version__}, cpu_offload={offload}", flush=True)
    state = get_model_state_dict(model, options=options)
    if dist.get_rank() == 0:
        print(f"  {sorted(state)}", flush=True)
dist.destroy_process_group()
