"""An object that has grown since it was new, saved and loaded by DCP into a new one.

python grown_object.py
"""

import sys
import tempfile
import warnings
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

warnings.filterwarnings("ignore", message="torch.distributed is")


class Holder:
    def __init__(self, held: Any) -> None:
        self.held = held

    def state_dict(self) -> dict[str, Any]:
        return {"held": self.held}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.held = state_dict["held"]


GROWN: dict[str, tuple[Any, Any]] = {
    "a dictionary": ({"epoch 1": 0.5, "epoch 2": 0.25}, {"epoch 1": 0.0}),
    "an empty dictionary": ({"epoch 1": 0.5}, {}),
    "a list of tensors": ([torch.ones(1), torch.ones(1)], [torch.zeros(1)]),
    "a list of numbers": ([1, 2], [0]),
    "a list of dictionaries": ([{"epoch": 1}], []),
}

print(f"torch {torch.__version__}")
lost = False
for name, (saved, new) in GROWN.items():
    with tempfile.TemporaryDirectory() as folder:
        dcp.save({"one": Holder(saved)}, checkpoint_id=folder, no_dist=True)
        loaded = Holder(new)
        try:
            dcp.load({"one": loaded}, checkpoint_id=folder, no_dist=True)
            told = f"loaded {loaded.held}"
            lost |= len(loaded.held) < len(saved)
        except CheckpointException as error:
            told = str(error).strip().splitlines()[-1]
    print(f"  {name}: saved {saved}, {told}")
sys.exit(lost)
