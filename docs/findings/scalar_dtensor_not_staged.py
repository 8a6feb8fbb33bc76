"""An asynchronous save of a DTensor without dimensions, which training changes before it is written.

python scalar_dtensor_not_staged.py
"""

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
MAKES = {
    "tensor, no dimensions": lambda: torch.tensor(1.0),
    "tensor, one dimension": lambda: torch.ones(1),
    "DTensor, no dimensions": lambda: distribute_tensor(torch.tensor(1.0), mesh, [Replicate()]),
    "DTensor, one dimension": lambda: distribute_tensor(torch.ones(1), mesh, [Replicate()]),
}
print(f"torch {torch.__version__}")
wrong = False
for what, make in MAKES.items():
    with tempfile.TemporaryDirectory() as folder:
        saved = make()
        save = dcp.async_save({"scale": saved}, storage_writer=FileSystemWriter(folder))
        # Training goes on.
        (saved.to_local() if isinstance(saved, DTensor) else saved).fill_(2.0)
        save.result()
        loaded = torch.zeros(saved.shape)
        dcp.load({"scale": loaded}, checkpoint_id=folder)
        print(f"  {what}: saved 1.0, loaded {loaded.item()}")
        wrong |= loaded.item() != 1.0
dist.destroy_process_group()
sys.exit(wrong)
