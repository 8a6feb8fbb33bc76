"""Scenarios that go wrong, each in one way, on a rank that is not 0 and in a phase with a name."""

import os
import signal
import time

import torch
import torch.distributed as dist

from dcpbench.cell import steps
from dcpbench.cell.cell import Cell
from dcpbench.compare.across_layouts import digests_of_full
from dcpbench.compare.controls import perturbed_leaves
from dcpbench.compare.leaves import compare
from dcpbench.core.rank_report import Compared
from dcpbench.core.state import text_of
from dcpbench.runs.build_run import build_twin
from dcpbench.state.snapshot import snapshot_model

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


def layouts(cell: Cell) -> None:
    """A parallel model, merged from its ranks' parts, is the plain one from the same seed."""
    reference = steps.build_reference(cell)
    group = cell.world.group
    with cell.phase("verify"):
        plain = snapshot_model(build_twin(cell.config, cell.world, cell.config.seed).model)
        expected, _ = digests_of_full(plain, None)
        content, wrong = digests_of_full(snapshot_model(reference.live_run.model), group)
        control = compare(plain, perturbed_leaves(plain))
        found = [*wrong.values(), *compare(expected, content)]
        cell.record("model_equal", Compared.of(found, control, map(text_of, expected)), "as it was built")
