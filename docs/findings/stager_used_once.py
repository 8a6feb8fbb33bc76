"""A DefaultStager that is given to a second dcp.async_save.

python stager_used_once.py
"""

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

print(f"torch {torch.__version__}")
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
stager = DefaultStager(StagingOptions(False, False, False, False))
wrong = 0
with tempfile.TemporaryDirectory() as folder:
    for number in (1, 2):
        path = Path(folder) / str(number)
        try:
            state = {"weight": torch.full((4,), float(number))}
            dcp.async_save(state, checkpoint_id=path, async_stager=stager).result()
            loaded = {"weight": torch.zeros(4)}
            dcp.load(loaded, checkpoint_id=path)
            print(f"  save {number}: loaded {loaded['weight'].tolist()}")
        except KeyError as error:
            wrong += 1
            print(f"  save {number}: KeyError: {error}; .metadata is there: {(path / '.metadata').exists()}")
dist.destroy_process_group()
sys.exit(wrong)
