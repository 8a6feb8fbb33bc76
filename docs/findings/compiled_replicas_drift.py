"""Replicas of one model, fed the same batches, compiled by torch.compile on each GPU: are they equal?

    torchrun --nproc-per-node 4 compiled_replicas_drift.py                  # default kernels
    torchrun --nproc-per-node 4 compiled_replicas_drift.py --deterministic  # no timing of kernels

Plain torch, no checkpoint: exit status 1 if any gradient differs between ranks.
"""

import argparse
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F  # noqa: N812


class Net(nn.Module):
    """5-10-15-30-5 with a ReLU after each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in ((5, 10), (10, 15), (15, 30), (30, 5)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (batch, 5) to (batch, 5)."""
        for layer in self.layers:
            x = F.relu(layer(x))
        return x


def main() -> int:
    """Compare every rank's gradients after each step with rank 0's, bit for bit."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--deterministic", action="store_true")
    torch.use_deterministic_algorithms(parser.parse_args().deterministic)
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    torch.manual_seed(0)
    model = Net().cuda()
    compiled = torch.compile(model, dynamic=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    differing: set[str] = set()
    for step in range(6):
        torch.manual_seed(step)
        inputs, targets = torch.rand(24, 5).cuda(), 1 + torch.rand(24, 5).cuda()
        F.mse_loss(compiled(inputs), targets).backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            copies = [torch.empty_like(parameter.grad) for _ in range(dist.get_world_size())]
            dist.all_gather(copies, parameter.grad)
            for other, copy in enumerate(copies):
                if not torch.equal(copies[0], copy):
                    largest = (copies[0] - copy).abs().max().item()
                    differing.add(name)
                    if rank == 0 and step == 0:
                        print(f"step {step}: {name}: rank {other} differs from rank 0 by up to {largest:.3g}")
        optimizer.step()
        optimizer.zero_grad()
    if rank == 0:
        print(f"{len(differing)} of {len(list(model.parameters()))} gradients differed between ranks")
    dist.destroy_process_group()
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
