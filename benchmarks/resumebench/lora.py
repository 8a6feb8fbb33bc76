"""PEFT: LoRA adapters of a frozen GPT-2, saved alone, with the Trainer of transformers or in a plain loop."""

import sys
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

out, way, mistake = Path(sys.argv[1]), sys.argv[2], "".join(sys.argv[3:])
latest = get_last_checkpoint(str(out))
set_seed(0 if not latest or mistake != "other_base" else 1)
config = GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0.0)
model = GPT2LMHeadModel(config)
set_seed(0)
data = torch.randint(0, 32, (48, 8))
lora = LoraConfig(r=2, lora_alpha=4, target_modules=["c_attn"], task_type="CAUSAL_LM")
if latest and way == "loop" and mistake != "new_adapter":
    model = PeftModel.from_pretrained(model, latest, is_trainable=True)
else:
    model = get_peft_model(model, lora)

if way == "trainer":
    arguments = TrainingArguments(
        str(out), per_device_train_batch_size=4, max_steps=16, save_steps=4, learning_rate=1e-2,
        report_to="none", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in data])
    trainer.train(resume_from_checkpoint=latest)
    sys.exit()

optimizer = torch.optim.AdamW([value for value in model.parameters() if value.requires_grad], lr=1e-2)
model.eval()  # without dropout
step = 0
if latest:
    state = torch.load(Path(latest, "rest.pt"))
    if mistake != "no_optimizer":
        optimizer.load_state_dict(state["optimizer"])
    step = state["step"]
while step < 16:
    batch = data[torch.arange(4 * step, 4 * step + 4) % len(data)]
    loss = model(input_ids=batch, labels=batch).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    if step % 4 == 0:
        part = out / f"saving-{step}"
        model.save_pretrained(part)
        torch.save({"optimizer": optimizer.state_dict(), "step": step}, part / "rest.pt")
        part.rename(out / f"checkpoint-{step}")
