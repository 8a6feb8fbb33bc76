"""Four ranks save safetensors, a file each; then two save into the same folder. And a file that goes.

torchrun --nproc-per-node 4 safetensors_of_two_saves.py
"""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import (
    FileSystemReader,
    FileSystemWriter,
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

dist.init_process_group("gloo")
rank = dist.get_rank()
shared = [tempfile.mkdtemp() if rank == 0 else None]
dist.broadcast_object_list(shared)
four, two = DeviceMesh("cpu", [0, 1, 2, 3]), DeviceMesh("cpu", [0, 1])
FORMATS: dict[str, tuple[Callable[[str], Any], Callable[[str], Any]]] = {
    "FileSystemWriter": (FileSystemWriter, FileSystemReader),
    "HuggingFaceStorageWriter": (
        lambda folder: HuggingFaceStorageWriter(folder, save_distributed=True),
        HuggingFaceStorageReader,
    ),
}


def state(mesh: DeviceMesh, value: float) -> dict[str, DTensor]:
    return {"weight": distribute_tensor(torch.full((8,), value), mesh, [Shard(0)])}


def loaded(reader: Any) -> str:
    """What two ranks load into zeros."""
    target = state(two, 0.0)
    try:
        dcp.load(target, storage_reader=reader, process_group=two.get_group())
    except dcp.CheckpointException:
        return "refused"
    return str(target["weight"].full_tensor().tolist())


if rank == 0:
    print(f"torch {torch.__version__}")
wrong = 0
for name, (writer, reader) in FORMATS.items():
    folder = f"{shared[0]}/{name}"
    dcp.save(state(four, 4.0), storage_writer=writer(folder))
    if rank < 2:
        dcp.save(state(two, 2.0), storage_writer=writer(folder), process_group=two.get_group())
        over = loaded(reader(folder))
        fresh = f"{folder}-of-two"
        dcp.save(state(two, 2.0), storage_writer=writer(fresh), process_group=two.get_group())
        if rank == 0:
            min(path for path in Path(fresh).iterdir() if not path.name.startswith(".")).unlink()
        dist.barrier(two.get_group())
        without = loaded(reader(fresh))
        wrong += over != str([2.0] * 8)
        wrong += without != "refused"
        if rank == 0:
            print(f"  {name}")
            print(f"    fours of four ranks, then twos of two: loaded {over}")
            print(f"    twos of two ranks, without the first one's file: {without}")
dist.barrier()
dist.destroy_process_group()
sys.exit(bool(wrong))
