"""fully_shard with MixedPrecisionPolicy: a layer that is frozen in the first step, and trained in the second.

python unfrozen_in_bf16.py
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def trained(policy: MixedPrecisionPolicy, frozen_first: bool) -> str:
    torch.manual_seed(0)
    model, mesh = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), init_device_mesh("cpu", (1,))
    for module in (*model, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    model[0].requires_grad_(not frozen_first)
    for step in (1, 2):
        try:
            model(torch.ones(2, 4)).sum().backward()
        except RuntimeError as error:
            return f"step {step}: {str(error).splitlines()[0]}"[:110]
        model[0].requires_grad_(True)
    return "two steps"


print(f"torch {torch.__version__}")
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
wrong = 0
for policy, frozen in ((MixedPrecisionPolicy(), True), (bf16, False), (bf16, True)):
    ended = trained(policy, frozen)
    wrong += ended != "two steps"
    print(f"  param_dtype={policy.param_dtype}, frozen at first: {frozen}: {ended}")
dist.destroy_process_group()
sys.exit(bool(wrong))
