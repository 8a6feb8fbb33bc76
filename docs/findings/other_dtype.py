"""Tensors that are loaded by DCP into tensors of another dtype.

python other_dtype.py
"""

import sys
import tempfile
import warnings

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

warnings.filterwarnings("ignore", message="torch.distributed is")

SAVED = {"floats": torch.tensor([1 / 3, 300.7, -5.2]), "integers": torch.tensor([2**40, 3, -1])}
INTO = {"floats": [torch.float32, torch.bfloat16, torch.uint8, torch.bool], "integers": [torch.int32]}

print(f"torch {torch.__version__}")
folder = tempfile.mkdtemp()
dcp.save(SAVED, checkpoint_id=folder)
accepted = 0
for name, dtypes in INTO.items():
    saved = SAVED[name]
    print(f"  {saved.dtype} {saved.tolist()}")
    for dtype in dtypes:
        loaded = {name: torch.zeros(3, dtype=dtype)}
        try:
            dcp.load(loaded, checkpoint_id=folder)
        except CheckpointException as error:
            print(f"    into {dtype}: refused, {str(error).strip().splitlines()[-1]}")
            continue
        accepted += dtype != saved.dtype
        print(f"    into {dtype}: {loaded[name].tolist()}")
sys.exit(accepted)
