"""Scenarios that go wrong, each in one way, on a rank that is not 0 and in a phase with a name."""

import os
import signal
import time

import torch
import torch.distributed as dist

from dcpbench.cell.cell import Cell

VICTIM = 1


def raises(cell: Cell) -> None:
    """One rank raises; its peers wait for it in a collective."""
    with cell.phase("train"):
        if cell.world.rank == VICTIM:
            raise ValueError("planted")
        dist.all_reduce(torch.ones(1))


def kills_itself(cell: Cell) -> None:
    """One rank is killed, as the kernel does when memory runs out."""
    with cell.phase("load"):
        if cell.world.rank == VICTIM:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1))


def hangs(cell: Cell) -> None:
    """One rank never enters the collective that the others wait in."""
    with cell.phase("verify"):
        while cell.world.rank == VICTIM:
            time.sleep(60)
        dist.all_reduce(torch.ones(1))
