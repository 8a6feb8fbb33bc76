"""A workload whose data is loaded by other processes, also when its module is imported."""

import multiprocessing

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from dcpbench.workloads.workload import Workload
from support.ordinary_workloads import SAMPLES, WIDTH, net, reversed_loss

ROWS = [torch.full((WIDTH,), number / 32) for number in range(32)]
with multiprocessing.get_context("fork").Pool(1) as pool:
    ORDER = pool.map(abs, range(len(ROWS)))


def loads_with_workers() -> Workload:
    """Draw batches with a `DataLoader`, and only where there are ranks."""
    assert dist.is_initialized(), "built outside of ranks"

    def batch(generator: torch.Generator) -> torch.Tensor:
        order = torch.randperm(len(ORDER), generator=generator).tolist()
        rows = DataLoader([ROWS[ORDER[number]] for number in order], SAMPLES, num_workers=1)
        return next(iter(rows))

    return Workload(net(), batch, reversed_loss)
