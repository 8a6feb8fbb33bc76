"""Train and save several times; then load each checkpoint into a new run, compare, and train on. Also in one
process without a process group."""

from typing import Any

import torch
import torch.distributed as dist

from dcpbench.cell import checkpoint_files, checks, contract, steps
from dcpbench.cell.cell import Cell
from dcpbench.cell.handover import Saved
from dcpbench.cell.pace import with_steps
from dcpbench.cell.steps import ReferenceRun
from dcpbench.core.mismatch import Mismatch
from dcpbench.core.rank_report import Compared


def save_load(cell: Cell) -> None:
    """A load restores the saved state bit for bit, and training continues with the losses of the reference
    run."""
    cell, reference, saved = begin(cell)
    checks.verify_training(cell, reference)
    load_and_resume(cell, saved)


def begin(cell: Cell) -> tuple[Cell, ReferenceRun, Saved]:
    """Train the reference run and save it; return the cell with its numbers of steps."""
    reference = steps.build(cell)
    cell = with_steps(cell, reference)
    checkpoints = steps.train_and_save(cell, reference)
    return cell, reference, Saved([*checkpoints], reference.record)


def load_and_resume(cell: Cell, saved: Saved) -> None:
    """Load each checkpoint, the newest first, into a model that nothing was loaded into before; train on."""
    target = steps.build_target(cell, saved.record)
    checkpoints = checkpoint_files.remaining(cell, saved.checkpoints)
    for number, checkpoint in enumerate(reversed(checkpoints)):
        before = checks.load_and_verify(cell, target, checkpoint, number)
        if number == 0:  # a run that loads its own state does not change
            with cell.phase("load"):
                target.set_again()
            checks.verify_restored(cell, target, checkpoint, before)
        checks.resume(cell, target, checkpoint, saved.record)
    checks.verify_saved_again(cell, target, checkpoints[0], saved.record)


def no_dist(cell: Cell) -> None:
    """DCP saves and loads in one process without a process group, also an empty state dict."""
    checkpointer = steps.open_checkpointer(cell)

    def keys_of(state: dict[str, Any], name: str) -> list[Mismatch]:
        """Save `state`, load it into an empty dict, and return a mismatch for every key found."""
        checkpoint_id = str(cell.folder / name)
        with cell.phase("save"):
            checkpointer.save(state, checkpoint_id).wait()
        loaded: dict[str, Any] = {}
        with cell.phase("load"):
            checkpointer.load(loaded, checkpoint_id)
        held = {*loaded, *checkpointer.manifest(checkpoint_id).entries}
        return [contract.violation("empty state dict", f"it contains {key}") for key in sorted(held)]

    empty = keys_of({}, "empty")
    if dist.is_initialized():
        empty.append(contract.violation("empty state dict", "it was saved with a process group"))
    full = keys_of({"something": torch.ones(1)}, "full")
    cell.record("contract_held", Compared.of(empty, full, ["empty state dict"]), "saved and loaded")
    save_load(cell)
