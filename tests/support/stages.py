"""A scenario of two stages: a rank is killed in a save, and fresh ranks load the checkpoint before it."""

import os
import signal
from dataclasses import replace
from typing import Any
from unittest import mock

from torch.distributed.checkpoint import FileSystemWriter

from dcpbench.cell import checks, handover, steps
from dcpbench.cell.cell import Cell

VICTIM = 1


def save_twice(cell: Cell, dies: bool) -> None:
    """The first checkpoint is handed over; in the second save a rank is killed before it writes, if it
    `dies`."""
    reference = steps.build_reference(cell)
    first, second = cell.config.steps_before_save, 2 * cell.config.steps_before_save
    steps.train_reference(cell, reference, first)
    saved = steps.finish(cell, steps.save(cell, reference.live_run))
    steps.train_reference(cell, reference, second)
    handover.write_reference(cell, replace(reference, checkpoints=[saved]), any_layout=True)

    def kill(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    honest = FileSystemWriter.write_data
    killed = dies and cell.world.rank == VICTIM
    with mock.patch.object(FileSystemWriter, "write_data", kill if killed else honest):
        steps.finish(cell, steps.save(cell, reference.live_run))


def load_first(cell: Cell, dies: bool) -> None:
    """State that was handed over is restored in processes without the first stage, and training continues."""
    cell, reference = handover.read_reference(cell, any_layout=True)
    (checkpoint,) = reference.checkpoints
    unfinished = cell.folder / f"step-{2 * cell.config.steps_before_save:04d}"
    assert unfinished.exists()
    assert not (unfinished / ".metadata").exists(), "the second save came to an end"
    target = steps.build_target(cell, reference)
    checks.load_and_verify(cell, target, checkpoint)
    checks.resume(cell, target, checkpoint, reference)
