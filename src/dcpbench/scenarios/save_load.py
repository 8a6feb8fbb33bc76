"""Train and save, several times, and go on; then, for every checkpoint, build everything anew, load,
compare, and train on as if nothing had happened. Also in one process without a process group."""

from typing import Any

import torch
import torch.distributed as dist

from dcpbench.cell import checks, contract, handover, steps
from dcpbench.cell.cell import Cell
from dcpbench.core.mismatch import Mismatch
from dcpbench.core.rank_report import Compared


def save_load(cell: Cell) -> None:
    """What was saved comes back bit for bit, and training goes on with the losses it would have had."""
    reference = steps.build(cell)
    checkpoints = steps.train_and_save(cell, reference)
    checks.verify_training(cell, reference)

    # The newest first: it is the one that meets a model nothing was ever loaded into.
    target = steps.build_anew(cell)
    target.keeps_random = reference.trained.keeps_random
    for number, checkpoint in enumerate(reversed(checkpoints)):
        before = checks.load_and_verify(cell, target, checkpoint, number)
        if number == 0:  # setting what is there changes nothing
            with cell.phase("load"):
                target.set_again()
            checks.verify_restored(cell, target, checkpoint, before)
        checks.resume(cell, target, checkpoint, reference.losses)
    checks.verify_saved_again(cell, target, checkpoints[0])
    if cell.config.own_trainer:
        handover.leave_to_trainer(cell, checkpoints[-1], reference.trained, reference.losses)


def no_dist(cell: Cell) -> None:
    """One process and no process group: DCP saves and loads without anybody to coordinate with. What was
    saved comes back, also if it was nothing at all."""
    checkpointer = steps.open_checkpointer(cell)

    def came_back(state: dict[str, Any], name: str) -> list[Mismatch]:
        """What a checkpoint holds that was made of an empty state dict, and what an empty one gets of it."""
        checkpoint_id = str(cell.folder / name)
        with cell.phase("save"):
            checkpointer.save(state, checkpoint_id).wait()
        loaded: dict[str, Any] = {}
        with cell.phase("load"):
            checkpointer.load(loaded, checkpoint_id)
        held = {*loaded, *checkpointer.manifest(checkpoint_id).entries}
        return [contract.violation("empty state dict", f"it holds {key}") for key in sorted(held)]

    empty = came_back({}, "empty")
    if dist.is_initialized():
        empty.append(contract.violation("empty state dict", "it was saved with a process group"))
    full = came_back({"something": torch.ones(1)}, "full")
    cell.record("contract_held", Compared.of(empty, full, ["empty state dict"]), "saved and loaded")
    save_load(cell)
