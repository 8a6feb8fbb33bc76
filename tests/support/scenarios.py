"""Scenarios that go wrong, each in one way, on a rank that is not 0 and in a phase with a name."""

import os
import signal
import subprocess
import sys
import time

import torch
import torch.distributed as dist

from dcpbench.cell import steps
from dcpbench.cell.cell import Cell
from dcpbench.core.rank_report import Compared
from dcpbench.verify.compare import compare
from dcpbench.verify.compare_layouts import digests
from dcpbench.verify.perturb import all_different
from dcpbench.verify.snapshot import snapshot_model
from dcpbench.workloads.build_run import build_twin

VICTIM = 2


def raises(cell: Cell) -> None:
    """One rank raises; its peers wait for it in a collective."""
    with cell.phase("train"):
        if cell.world.rank == VICTIM:
            raise ValueError("planted <b>error</b>")
        dist.all_reduce(torch.ones(1))


def exits(cell: Cell) -> None:
    """One rank leaves without a word."""
    with cell.phase("save"):
        if cell.world.rank == VICTIM:
            os._exit(7)
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
        if cell.world.rank == VICTIM:
            _wait_for_ever()
        dist.all_reduce(torch.ones(1))


def leaves_child(cell: Cell) -> None:
    """A cell that starts a process in a session of its own, and hangs."""
    with cell.phase("train"):
        if cell.world.rank == VICTIM:
            program = [sys.executable, "-c", "import time; time.sleep(600)"]
            child = subprocess.Popen(program, start_new_session=True)
            (cell.folder / "child.pid").write_text(str(child.pid))
        _wait_for_ever()


def layouts(cell: Cell) -> None:
    """A parallel model, merged from its ranks' parts, is the plain one from the same seed."""
    reference = steps.build(cell)
    group = cell.world.group
    with cell.phase("verify"):
        plain = snapshot_model(build_twin(cell.config, cell.world, cell.config.seed).model)
        expected, _ = digests(plain, None)
        content, wrong = digests(snapshot_model(reference.trained.model), group)
        control = compare(plain, all_different(plain))
        found = [*wrong, *compare(expected, content)]
        cell.record("model_equal", Compared.of(found, control, list(expected)), "as it was built")


def _wait_for_ever() -> None:
    while True:
        time.sleep(60)
