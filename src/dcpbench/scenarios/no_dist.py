"""One process and no process group: DCP saves and loads without anybody to coordinate with."""

from typing import Any

import torch
import torch.distributed as dist

from dcpbench.scenarios import checks, steps
from dcpbench.scenarios.cell import Cell
from dcpbench.scenarios.save_load import save_load
from dcpbench.verify.compare import Mismatch


def no_dist(cell: Cell) -> None:
    """What was saved comes back, also if it was nothing at all."""
    storage = steps.open_storage(cell)

    def came_back(state: dict[str, Any], name: str) -> list[Mismatch]:
        """What a checkpoint holds that was made of an empty state dict, and what an empty one gets of it."""
        checkpoint_id = str(cell.folder / name)
        with cell.phase("save"):
            steps.write(cell, state, checkpoint_id, storage, None).wait()
        loaded: dict[str, Any] = {}
        with cell.phase("load"):
            steps.read(cell, loaded, checkpoint_id, storage)
        held = {*loaded, *steps.keys(checkpoint_id, storage)}
        return [Mismatch("empty state dict", f"it holds {key}") for key in sorted(held)]

    empty = came_back({}, "empty")
    if dist.is_initialized():
        empty.append(Mismatch("empty state dict", "it was saved with a process group"))
    full = came_back({"something": torch.ones(1)}, "full")
    checks.verify_contract(cell, empty, full, ["empty state dict"], "saved and loaded")
    save_load(cell)
