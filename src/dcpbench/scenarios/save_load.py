"""Train and save several times; then load each checkpoint into a new run, compare, and train on. Also in one
process without a process group."""

from typing import Any

import torch
import torch.distributed as dist

from dcpbench.cell import checkpoint_files, checks, contract, steps, uninterrupted
from dcpbench.cell.cell import Cell
from dcpbench.cell.steps import ReferenceRun
from dcpbench.core.mismatch import Mismatch
from dcpbench.core.rank_report import Compared


def save_load(cell: Cell) -> None:
    """Run all stages, for scenarios that do more: a load restores the saved state bit for bit, and training
    continues with the losses of the reference run."""
    load_and_resume(*uninterrupted.save_reference(*uninterrupted.train_unsaved(cell)))


def load_and_resume(cell: Cell, saved: ReferenceRun) -> None:
    """Load each checkpoint, the newest first, into a model that nothing was loaded into before; train on."""
    target = steps.build_target(cell, saved)
    checkpoints = checkpoint_files.not_removed(cell, saved.checkpoints)
    for number, checkpoint in enumerate(reversed(checkpoints)):
        before = checks.load_and_verify(cell, target, checkpoint, number)
        if number == 0 and not cell.config.own_trainer:  # a run that loads its own state does not change
            with cell.phase("load"):
                for stateful in target.state().values():
                    stateful.load_state_dict(stateful.state_dict())
            checks.verify_restored(cell, target, checkpoint, before)
        checks.resume(cell, target, checkpoint, saved)
    for checkpoint in checkpoints[:1]:  # a trainer may have removed all
        checks.verify_saved_again(cell, target, checkpoint, saved)
    for checkpoint in checkpoints[-1:] if cell.config.own_trainer else ():
        checks.verify_saved_early(cell, target, checkpoint, saved)


def no_dist(cell: Cell) -> None:
    """DCP saves and loads in one process without a process group, also an empty state dict."""
    checkpointer = cell.vary().checkpointer  # it may keep copies of what it has saved

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
