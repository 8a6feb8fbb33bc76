"""Ranks that `torch.multiprocessing.spawn` starts: DDP, dropout, a generator of each rank."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def train(rank, world_size, out, rendezvous, mistake):
    """Train on one rank."""
    dist.init_process_group("gloo", f"file://{rendezvous}", rank=rank, world_size=world_size)
    torch.manual_seed(0 if mistake != "seeded_by_rank" else rank)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 1))
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    step = 0
    for path in sorted(out.glob("step-??.pt"), reverse=True)[:1]:
        state = torch.load(path)
        model.load_state_dict(state["model"])
        if mistake != "no_momentum":
            optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
        if mistake == "generator_of_rank_0":
            torch.set_rng_state(state["generators"][0])
        else:
            torch.set_rng_state(state["generators"][rank])
    if step == 0:
        torch.manual_seed(rank)
    while step < 12:
        batch = torch.randn(4, 4, generator=torch.Generator().manual_seed(10 * step + rank))
        loss = (model(batch) - batch.sum(1, keepdim=True)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % 3 == 0:
            generators = [None] * world_size
            dist.all_gather_object(generators, torch.get_rng_state())
            if rank == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                torch.save(state | {"generators": generators}, out / "saving.part")
                (out / "saving.part").rename(out / f"step-{step:02}.pt")
            dist.barrier()
    dist.barrier()
    del model, optimizer, loss  # gloo can hang where DDP outlives its group
    dist.destroy_process_group()


if __name__ == "__main__":
    out, mistake = Path(sys.argv[1]), "".join(sys.argv[2:])
    rendezvous = out / "rendezvous"
    rendezvous.unlink(missing_ok=True)
    mp.spawn(train, (2, out, rendezvous, mistake), nprocs=2)
