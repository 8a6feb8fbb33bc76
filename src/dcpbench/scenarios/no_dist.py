"""One process and no process group: DCP saves and loads without anybody to coordinate with."""

from typing import Any

import torch
import torch.distributed as dist

from dcpbench.records.findings import Finding
from dcpbench.scenarios import checks, steps
from dcpbench.scenarios.cell import Cell
from dcpbench.scenarios.save_load import save_load


def no_dist(cell: Cell) -> None:
    """What was saved comes back, also if it was nothing at all."""
    checkpointer = steps.open_checkpointer(cell)

    def came_back(state: dict[str, Any], name: str) -> list[Finding]:
        """What a checkpoint holds that was made of an empty state dict, and what an empty one gets of it."""
        checkpoint_id = str(cell.folder / name)
        with cell.phase("save"):
            checkpointer.save(state, checkpoint_id).wait()
        loaded: dict[str, Any] = {}
        with cell.phase("load"):
            checkpointer.load(loaded, checkpoint_id)
        held = {*loaded, *checkpointer.manifest(checkpoint_id).entries}
        return [checks.breach("empty state dict", f"it holds {key}") for key in sorted(held)]

    empty = came_back({}, "empty")
    if dist.is_initialized():
        empty.append(checks.breach("empty state dict", "it was saved with a process group"))
    full = came_back({"something": torch.ones(1)}, "full")
    checks.verify_contract(cell, empty, full, ["empty state dict"], "saved and loaded")
    save_load(cell)
