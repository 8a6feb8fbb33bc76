"""An optimizer whose counters are float32 while its parameters are bfloat16, saved and loaded by itself.

python state_in_low_precision.py
"""

import sys

import torch

print(f"torch {torch.__version__}")
wrong = 0
for kind, names in ((torch.optim.NAdam, ["mu_product"]), (torch.optim.ASGD, ["eta", "mu"])):
    parameters = [torch.ones(4, dtype=torch.bfloat16, requires_grad=True) for _ in range(2)]
    optimizers = [kind([parameter]) for parameter in parameters]
    for _ in range(3):
        parameters[0].grad = torch.ones_like(parameters[0])
        optimizers[0].step()
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    for name in names:
        saved, restored = (optimizers[one].state[parameters[one]][name] for one in range(2))
        values = [f"{one.item():.9g} {one.dtype}" for one in (saved, restored)]
        print(f"  {kind.__name__} {name}: saved {values[0]}, restored {values[1]}")
        wrong += saved.dtype != restored.dtype
sys.exit(bool(wrong))
