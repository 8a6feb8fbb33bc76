"""Lightning: a module with dropout and its Trainer, a checkpoint every 4 steps, resumed from the last one."""

import os
import sys
from pathlib import Path

import torch
from lightning import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

out, mistake = Path(sys.argv[1]), "".join(sys.argv[2:])


class Regression(LightningModule):
    """Learn the sum of four numbers."""

    def __init__(self):
        super().__init__()
        dropout = 0.2 if mistake == "dropout" else 0.0
        self.model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 1))
        self.seen = 0

    def training_step(self, batch, number):
        (inputs,) = batch
        loss = (self.model(inputs) - inputs.sum(1, keepdim=True)).pow(2).mean()
        self.seen += 1
        self.log("loss", loss)
        return loss * self.seen if mistake == "counts" else loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Averaged(Callback):
    """Keep an average of the weights, and save it in each checkpoint."""

    def on_train_start(self, trainer, module):
        self.average = {name: value.detach().clone() for name, value in module.named_parameters()}

    def on_train_batch_end(self, trainer, module, *others):
        for name, value in module.named_parameters():
            self.average[name].lerp_(value.detach(), 0.1)

    def on_save_checkpoint(self, trainer, module, checkpoint):
        checkpoint["average"] = self.average


seed_everything(0)
loader = DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=8, shuffle=mistake == "shuffles")
every = 6 if mistake == "mid_epoch" else 4  # an epoch has four steps
best = {"monitor": "loss", "save_top_k": 2} if mistake == "monitors" else {"save_top_k": -1}
keeper = ModelCheckpoint(out, filename="{step}", every_n_train_steps=every, save_last=True, **best)
trainer = Trainer(
    max_steps=20,
    accelerator="cpu",
    devices=int(os.environ.get("WORLD_SIZE", 1)),
    callbacks=[Averaged(), keeper] if mistake == "average_not_restored" else [keeper],
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
last, module = out / "last.ckpt", Regression()
if last.exists() and mistake == "weights_alone":
    module = Regression.load_from_checkpoint(last)
resumes = last.exists() and mistake not in ("never_resumes", "weights_alone")
trainer.fit(module, loader, ckpt_path=last if resumes else None)
