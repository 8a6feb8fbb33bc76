"""A checkpoint that was saved without collectives, loaded on fewer ranks or under another placement.

torchrun --nproc-per-node 2 load_without_collectives.py
"""

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh


def tell(what: str, part: torch.Tensor, expected: torch.Tensor) -> bool:
    wrong = not torch.equal(part, expected)
    told = [f"rank {dist.get_rank()} {what}: {part.tolist()}{', which is wrong' if wrong else ''}"]
    everybody: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everybody, told)
    if not dist.get_rank():
        print(*(f"  {line}" for lines in everybody for line in lines), sep="\n")
    return wrong


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (world,))
places = [tempfile.mkdtemp()]
dist.broadcast_object_list(places)
whole = torch.arange(1.0, 9.0).reshape(4, 2)
saved = {"weight": distribute_tensor(whole, mesh, [Shard(0)])}
dcp.save(saved, checkpoint_id=places[0], use_collectives=False)
dist.barrier()
if not rank:
    print(f"torch {torch.__version__}")
wrong = False
for dim in (0, 1):
    loaded = {"weight": distribute_tensor(torch.zeros(4, 2), mesh, [Shard(dim)])}
    dcp.load(loaded, checkpoint_id=places[0])
    wrong |= tell(f"with Shard({dim})", loaded["weight"].to_local(), whole.chunk(world, dim)[rank])
alone = {"weight": torch.zeros(4, 2)}
dcp.load(alone, checkpoint_id=places[0], no_dist=True)
wrong |= tell("by itself, all of it", alone["weight"], whole)
dist.destroy_process_group()
sys.exit(wrong)
