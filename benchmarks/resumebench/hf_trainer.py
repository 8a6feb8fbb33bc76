"""The Trainer of transformers: a small GPT-2, a schedule, the newest two checkpoints kept."""

import sys
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

out, mistake = Path(sys.argv[1]), "".join(sys.argv[2:])
set_seed(0)
data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 32, (64, 8))]
latest = get_last_checkpoint(str(out))
config = GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=1, n_head=2)
if mistake == "model_alone" and latest:
    model = GPT2LMHeadModel.from_pretrained(latest)
else:
    model = GPT2LMHeadModel(config)


class Averaged(TrainerCallback):
    """Keep an average of the weights, and save it next to each checkpoint."""

    def on_train_begin(self, args, state, control, model, **others):
        self.average = {name: value.detach().clone() for name, value in model.named_parameters()}

    def on_step_end(self, args, state, control, model, **others):
        for name, value in model.named_parameters():
            self.average[name].lerp_(value.detach(), 0.1)

    def on_save(self, args, state, control, **others):
        torch.save(self.average, out / f"checkpoint-{state.global_step}" / "average.pt")


class Streamed(torch.utils.data.IterableDataset):
    """The data as a stream, without a length."""

    def __iter__(self):
        return iter(data)


arguments = TrainingArguments(
    str(out),
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2 if mistake == "accumulates" else 1,
    max_steps=30 if mistake == "longer_schedule" and latest else 20,
    learning_rate=1e-3,
    warmup_steps=3,
    save_steps=6,
    save_total_limit=2,
    save_only_model=mistake == "saves_model_only",
    ignore_data_skip=mistake == "ignores_data_skip",
    eval_strategy="steps" if mistake == "evaluates" else "no",
    eval_steps=4,
    gradient_checkpointing=mistake == "recomputes",
    bf16=mistake == "bf16",
    optim="adafactor" if mistake == "adafactor" else "adamw_torch",
    logging_steps=5,
    report_to="none",
    use_cpu=True,
    disable_tqdm=True,
)
callbacks = [Averaged()] if mistake == "average_not_restored" else []
train = Streamed() if mistake == "streams" else data
trainer = Trainer(model, arguments, train_dataset=train, eval_dataset=data[:8], callbacks=callbacks)
trainer.train(resume_from_checkpoint=latest if mistake not in ("never_resumes", "model_alone") else None)
