"""Gradients of a module that `fully_shard` has over a mesh of one rank, with a divide factor of its own.

python gradient_divide_factor.py
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def gradient(factor: float | None, sums: bool, reduce_dtype: torch.dtype | None) -> float:
    """The first element of a weight's gradient, which is 4 on its own."""
    layer = nn.Linear(1, 1, bias=False)
    policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
    fully_shard(layer, mesh=init_device_mesh("cpu", (1,)), mp_policy=policy)
    layer.set_force_sum_reduction_for_comms(sums)
    if factor:
        layer.set_gradient_divide_factor(factor)
    layer(torch.full((1, 1), 4.0)).sum().backward()
    return layer.weight.grad.to_local().item()


def main() -> int:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    print(f"torch {torch.__version__}")
    wrong = 0
    for about, sums, reduce_dtype in (
        ("as it comes", False, None),
        ("set_force_sum_reduction_for_comms(True)", True, None),
        ("reduce_dtype=torch.float16", False, torch.float16),
    ):
        found = gradient(2.0, sums, reduce_dtype)
        wrong += found != gradient(None, sums, reduce_dtype) / 2
        print(f"  {about}: {gradient(None, sums, reduce_dtype)}, divided by 2 {found}")
    dist.destroy_process_group()
    return wrong


if __name__ == "__main__":
    sys.exit(main())
