"""A save with collectives, then one without them into the same place, of a model that two ranks both have.

torchrun --nproc-per-node 2 metadata_of_two_saves.py
"""

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter

dist.init_process_group("gloo")
rank = dist.get_rank()
if rank == 0:
    print(f"torch {torch.__version__}")
wrong = 0
for overwrite in (True, False):
    shared = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(shared)
    folder = str(shared[0])
    for step, use_collectives in ((10, True), (20, False)):
        state = {f"layer{number}": torch.full((2,), float(step + number)) for number in range(4)}
        writer = FileSystemWriter(folder, overwrite=overwrite)
        try:
            dcp.save(state, storage_writer=writer, use_collectives=use_collectives)
            told = "reported success"
        except RuntimeError as error:
            told = f"refused: {error}"
        if rank == 0:
            print(f"  overwrite={overwrite}, step {step} with use_collectives={use_collectives}: {told}")
    loaded = {name: torch.zeros(2) for name in state}
    dcp.load(loaded, checkpoint_id=folder)
    expected = 20.0 if told == "reported success" else 10.0
    values = [value[0].item() for value in loaded.values()]
    wrong += values != [expected + number for number in range(4)] or not (overwrite or expected == 10.0)
    if rank == 0:
        files = sorted(path.name for path in Path(folder).iterdir())
        print(f"    files {files}, loaded {values}")
    dist.barrier()
dist.destroy_process_group()
sys.exit(bool(wrong))
