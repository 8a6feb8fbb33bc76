"""Convert a checkpoint of DCP into a file of `torch.save` and back with torch's converters."""

from dataclasses import replace

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import (
    BroadcastingTorchSaveReader,
    DynamicMetaLoadPlanner,
    dcp_to_torch_save,
    torch_save_to_dcp,
)
from torch.distributed.tensor import DTensor

from dcpbench.cell import checks, steps, uninterrupted
from dcpbench.cell.cell import Cell
from dcpbench.cell.checkpoint import Checkpoint
from dcpbench.cell.checkpoint_files import wait_until_seen
from dcpbench.cell.steps import ReferenceRun
from dcpbench.core.mismatch import Place
from dcpbench.core.state import StatePart
from dcpbench.state.snapshot import flattened
from dcpbench.torch_private import SHARDED_TENSOR


def formats(cell: Cell) -> None:
    """The converted file contains the saved state. The checkpoint that is converted back from it restores
    that, and training continues."""
    reference = uninterrupted.train_and_save_reference(cell)
    saved = reference.checkpoints[-1]
    file, again = f"{saved.checkpoint_id}.pt", f"{saved.checkpoint_id}-again"
    with cell.phase("save", "converted"):
        if cell.world.rank == 0:
            dcp_to_torch_save(saved.checkpoint_id, file)
            torch_save_to_dcp(file, again)
        wait_until_seen(cell, cell.folder, "of the conversion")

    in_file = replace(saved, state=saved.as_saved, by_content=True, how=", converted for torch.load")
    with cell.phase("verify", "equality"):
        # The file may contain any class; this cell has just written it.
        held = torch.load(file, map_location="cpu", weights_only=False)
        values = flattened(held)
        checks.verify_values(cell, in_file, values, cell.world.group)

    _verify_broadcast(cell, reference, saved, file)
    target = steps.build_target(cell, reference)
    converted = replace(saved, checkpoint_id=again, how=", converted and back")
    cell.saved[again] = reference.live_run
    checks.load_and_verify(cell, target, converted)
    checks.resume(cell, target, converted, reference)


def _verify_broadcast(cell: Cell, record: ReferenceRun, saved: Checkpoint, file: str) -> None:
    """Torch's broadcasting reader of the file, which reads tensors only, restores the model."""
    target = steps.build_target(cell, record)
    model = target.state()["model"]
    why = None
    if not dist.is_initialized():
        why = "it needs a process group"
    elif any(type(value) in (DTensor, SHARDED_TENSOR.value) for value in model.state_dict().values()):
        why = "ranks wait for ever: it cannot broadcast sharded tensors"
    elif cell.world.device.type != "cpu":
        why = "ranks wait for ever: where a group has a backend for the CPU too it broadcasts from there"
    if why:
        cell.leave_out(["model_equal"], why, Place("read by BroadcastingTorchSaveReader"))
        return
    model_only = replace(saved, state={StatePart.model: saved.state[StatePart.model]}, how=", broadcast")
    before = checks.perturb_target(cell, target, model_only)
    with cell.phase("load", "broadcast"):
        dcp.load(
            {"model": model},
            storage_reader=BroadcastingTorchSaveReader(file),
            planner=DynamicMetaLoadPlanner(),
            process_group=cell.world.checkpoint_group,
        )
    checks.verify_restored(cell, target, model_only, before)
