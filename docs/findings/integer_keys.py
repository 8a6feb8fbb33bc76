"""A state dict whose keys are integers, saved and loaded by DCP: a counter, and MultiStepLR's milestones.

python integer_keys.py
"""

import copy
import sys
import tempfile
import warnings
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

warnings.filterwarnings("ignore", message="torch.distributed is")


class Counts:
    def __init__(self, counts: dict[int, int]) -> None:
        self.counts = counts

    def state_dict(self) -> dict[str, Any]:
        return {"counts": self.counts}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.counts = state_dict["counts"]


def save_and_load(saved: Any, loaded: Any) -> str:
    """What saving the loaded one once more comes to."""
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        dcp.save({"one": saved}, checkpoint_id=first, no_dist=True)
        dcp.load({"one": loaded}, checkpoint_id=first, no_dist=True)
        try:
            dcp.save({"one": copy.deepcopy(loaded)}, checkpoint_id=second, no_dist=True)
        except CheckpointException as error:
            return str(error).strip().splitlines()[-1]
    return "saved"


def multi_step() -> torch.optim.lr_scheduler.MultiStepLR:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[2, 4])


print(f"torch {torch.__version__}")
saved, loaded = Counts({1: 10, 2: 20}), Counts({1: 0, 2: 0})
again = save_and_load(saved, loaded)
print(f"  saved {saved.counts}, loaded {loaded.counts}, and saved again: {again}")
scheduler = multi_step()
again = save_and_load(multi_step(), scheduler)
print(f"  milestones {dict(scheduler.milestones)}, and saved again: {again}")
sys.exit(loaded.counts != saved.counts or again != "saved")
