"""What a load of a checkpoint does when a file of data is that of another save, or has a bit flipped.

python unchecked_bytes.py

Prints what comes back; exits with 1 if something else than what was saved comes back and nothing is raised.
"""

import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

warnings.filterwarnings("ignore")
DATA = "__0_0.distcp"


def save(folder: Path, step: int) -> None:
    dcp.save({"weight": torch.full((1000,), float(step)), "step": step}, checkpoint_id=folder, no_dist=True)


def other_save(folder: Path) -> None:
    shutil.copy(folder.with_name("of step 1") / DATA, folder / DATA)


def flipped_bit(folder: Path) -> None:
    held = bytearray((folder / DATA).read_bytes())
    held[held.index(torch.full((4,), 2.0).numpy().tobytes()) + 3] ^= 0x20
    (folder / DATA).write_bytes(held)


def loaded(damage: Callable[[Path], None]) -> bool:
    """Whether a load after this damage is as if there was none."""
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / "of step 2"
        save(Path(root) / "of step 1", 1)
        save(folder, 2)
        damage(folder)
        state = {"weight": torch.zeros(1000), "step": 0}
        try:
            dcp.load(state, checkpoint_id=folder, no_dist=True)
        except CheckpointException as error:
            print(f"  {damage.__name__}: refused: {next(iter(error.failures.values()))[0]!r}"[:100])
            return False
        values = sorted({*state["weight"].tolist()})
        print(f"  {damage.__name__}: loaded: weights {values}, step {state['step']}; saved: [2.0], step 2")
        return values != [2.0]


if __name__ == "__main__":
    print(f"torch {torch.__version__}")
    sys.exit(any([loaded(other_save), loaded(flipped_bit)]))
