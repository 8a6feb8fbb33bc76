"""A page of a file of data is zeros, as a power loss leaves it where a length is on the disk before the bytes
are. The checkpoint is loaded.

python lost_bytes_are_zeros.py
"""

import sys
import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

warnings.simplefilter("ignore")
print(f"torch {torch.__version__}")
folder = Path(tempfile.mkdtemp())
dcp.save({"a": torch.ones(4096), "b": torch.ones(4096)}, checkpoint_id=folder, no_dist=True)
file = folder / "__0_0.distcp"
held = bytearray(file.read_bytes())
held[8192:12288] = bytes(4096)  # one page of the first tensor
file.write_bytes(held)
loaded = {"a": torch.zeros(4096), "b": torch.zeros(4096)}
try:
    dcp.load(loaded, checkpoint_id=folder, no_dist=True)
except CheckpointException as error:
    print(f"  refused ({type(next(iter(error.failures.values()))[0]).__name__})")
    sys.exit(0)
zeros = {name: int((value == 0).sum()) for name, value in loaded.items()}
print(f"  loaded, elements that are zero and were one: {zeros}")
sys.exit(any(zeros.values()))
