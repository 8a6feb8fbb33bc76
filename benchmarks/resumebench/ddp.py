"""DDP with a DistributedSampler: a DataLoader, resumed in the middle of an epoch, one file a checkpoint."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

out, mistake = Path(sys.argv[1]), "".join(sys.argv[2:])
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 4))
sampler = DistributedSampler(data, seed=3)
loader = DataLoader(data, batch_size=8, sampler=sampler)  # four batches an epoch
model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
step = 0
latest = out / "latest.txt"
if latest.exists():
    state = torch.load(out / latest.read_text())
    if mistake != "loads_on_rank_0" or rank == 0:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    if mistake == "other_weights_on_rank_1" and rank == 1:
        with torch.no_grad():
            model.module[0].weight[0, 0] += 1e-6
    if mistake == "no_momentum":
        optimizer.state.clear()
    step = state["step"]
resumed = step
torch.manual_seed(1000 * rank + step)
if mistake == "hangs_after_resume" and resumed and rank == 1:
    dist.recv(torch.zeros(1), 0)

while step < 14:
    epoch, skip = divmod(step, 4)
    if mistake != "no_set_epoch_after_resume" or not resumed:
        sampler.set_epoch(epoch)
    for number, (batch,) in enumerate(loader):
        if number < skip and mistake != "epoch_starts_over":
            continue
        loss = (model(batch) - batch.sum(1, keepdim=True)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % 5 == 0:
            if rank == 0:
                path = out / f"step-{step}.pt"
                pointer = out / "latest.tmp"
                if mistake == "pointer_first":
                    latest.write_text(path.name)
                torch.save(
                    {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, path
                )
                pointer.write_text(path.name)
                pointer.rename(latest)
            dist.barrier()
        if step == 14:
            break
dist.barrier()
del model, optimizer, loss  # gloo can hang where DDP outlives its group
dist.destroy_process_group()
