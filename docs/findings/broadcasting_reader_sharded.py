"""BroadcastingTorchSaveReader: a file of torch.save into a tensor that two ranks share.

torchrun --nproc-per-node 2 broadcasting_reader_sharded.py
"""

import sys
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import BroadcastingTorchSaveReader, DynamicMetaLoadPlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

LIMIT = timedelta(seconds=15)  # 30 minutes where nobody says otherwise

dist.init_process_group("gloo", timeout=LIMIT)
rank = dist.get_rank()
shared = [tempfile.mkdtemp() if rank == 0 else None]
dist.broadcast_object_list(shared)
file = f"{shared[0]}/model.pt"
whole = torch.arange(4.0).reshape(2, 2)
if rank == 0:
    print(f"torch {torch.__version__}")
    torch.save({"weight": whole}, file)
dist.barrier()
mesh = init_device_mesh("cpu", (2,))
targets = {
    "replicated": torch.zeros(2, 2),
    "sharded": distribute_tensor(torch.zeros(2, 2), mesh, [Shard(0)]),
}
honest = dist.broadcast


def broadcast(tensor: torch.Tensor, **how: object) -> None:
    try:
        honest(tensor, **how)
    except Exception as error:
        text = str(error).splitlines()[0]
        print(f"    rank {rank}, of a {type(tensor).__name__}: {text[text.find(']') + 1 :].strip()[:90]}")
        raise


dist.broadcast = broadcast
wrong = 0
for name, target in targets.items():
    state = {"weight": target}
    if rank == 0:
        print(f"  {name}", flush=True)
    try:
        dcp.load(state, storage_reader=BroadcastingTorchSaveReader(file), planner=DynamicMetaLoadPlanner())
        print(f"    rank {rank}: {state['weight'].tolist()}", flush=True)
    except (RuntimeError, NotImplementedError, dcp.CheckpointException):
        wrong += 1
sys.exit(bool(wrong))
