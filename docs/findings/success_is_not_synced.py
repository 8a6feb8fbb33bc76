"""What of a checkpoint is sure to be on the disk when `dcp.save` has returned: of each file what it held when
it was last synced, and of the names whether their directories were.

python success_is_not_synced.py
"""

import os
import stat
import sys
import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException

warnings.simplefilter("ignore")
torch.distributed.checkpoint.state_dict_loader.logger.disabled = True
honest = os.fsync
synced: dict[int, bytes] = {}
directories: list[str] = []


def fsync(file: int) -> None:
    honest(file)
    path = Path(f"/proc/self/fd/{file}").readlink()
    if stat.S_ISDIR(os.fstat(file).st_mode):
        directories.append(path.name)
    else:
        synced[os.fstat(file).st_ino] = path.read_bytes()


os.fsync = fsync
print(f"torch {torch.__version__}")
wrong = 0
for tensors in (2, 500):
    folder = Path(tempfile.mkdtemp()) / "checkpoint"
    state = {f"tensor{number}": torch.ones(4) for number in range(tensors)}
    dcp.save(state, storage_writer=FileSystemWriter(folder, sync_files=True), no_dist=True)
    print(
        f"  {tensors} tensors, sync_files=True: reported success; directories that were synced: {directories}"
    )
    for path in sorted(folder.iterdir()):
        held = synced[path.stat().st_ino]
        print(f"    {path.name}: {len(held)} of {path.stat().st_size} bytes synced")
        path.write_bytes(held)
    try:
        dcp.load({name: torch.zeros(4) for name in state}, checkpoint_id=folder, no_dist=True)
        print("    with these bytes alone: loaded")
    except CheckpointException as error:
        print(
            f"    with these bytes alone: refused ({type(next(iter(error.failures.values()))[0]).__name__})"
        )
        wrong += 1
sys.exit(bool(wrong or not directories))
