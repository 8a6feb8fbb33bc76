"""accelerate: a prepared loop, `save_state`, `load_state` and accumulation, resumed in mid-epoch."""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

out, mistake = Path(sys.argv[1]), "".join(sys.argv[2:])
project = ProjectConfiguration(str(out), automatic_checkpoint_naming=True, total_limit=2)
loading = DataLoaderConfiguration(use_seedable_sampler=mistake != "default_sampler")
accelerator = Accelerator(
    cpu=True, gradient_accumulation_steps=2, project_config=project, dataloader_config=loading
)
set_seed(0)
loader = DataLoader(TensorDataset(torch.randn(96, 4)), batch_size=4, shuffle=True)
dropout = nn.Dropout(0.2 if mistake == "dropout" else 0.0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), dropout, nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60)
if mistake == "schedule_not_prepared":
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
else:
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)


class Progress:
    """What the loop counts."""

    step = 0

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


progress = Progress()
accelerator.register_for_checkpointing(progress)
folders = sorted((out / "checkpoints").glob("checkpoint_*"), key=lambda path: int(path.name[11:]))
if folders:
    if mistake == "model_alone":
        accelerator.unwrap_model(model).load_state_dict(load_file(folders[-1] / "model.safetensors"))
        progress.step = 5 * (1 + int(folders[-1].name[11:]))
    else:
        accelerator.load_state(str(folders[-1]))
    project.iteration = int(folders[-1].name[11:]) + 1

per_epoch = len(loader) // 2
while progress.step < 20:
    epoch, done = divmod(progress.step, per_epoch)
    loader.set_epoch(epoch)
    batches = loader if mistake == "epoch_starts_over" else accelerator.skip_first_batches(loader, 2 * done)
    for (batch,) in batches:
        with accelerator.accumulate(model):
            loss = (model(batch) - batch.sum(1, keepdim=True)).pow(2).mean()
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            progress.step += 1
            if progress.step % 5 == 0:
                accelerator.save_state()
        if progress.step == 20:
            break
accelerator.end_training()
