"""A scheduler that is made after the optimizer was loaded, and then loaded itself.

python scheduler_after_load.py
"""

import copy
import sys
from collections.abc import Callable

import torch
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    SequentialLR,
    StepLR,
)


def sequential(optimizer: torch.optim.Optimizer) -> LRScheduler:
    parts = LinearLR(optimizer, 0.25, total_iters=3), CosineAnnealingLR(optimizer, 20)
    return SequentialLR(optimizer, [*parts], milestones=[3])


MAKERS: dict[str, Callable[[torch.optim.Optimizer], LRScheduler]] = {
    "StepLR": lambda optimizer: StepLR(optimizer, 1, 0.5),
    "CosineAnnealingLR": lambda optimizer: CosineAnnealingLR(optimizer, 20),
    "OneCycleLR": lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=100),
    "SequentialLR": sequential,
}


def built() -> torch.optim.Optimizer:
    return torch.optim.Adam([torch.nn.Parameter(torch.ones(1))], lr=0.1)


print(f"torch {torch.__version__}")
differs = False
for name, make in MAKERS.items():
    trained = built()
    scheduler = make(trained)
    for _ in range(5):
        trained.param_groups[0]["params"][0].grad = torch.ones(1)
        trained.step()
        scheduler.step()
    resumed = built()
    resumed.load_state_dict(copy.deepcopy(trained.state_dict()))
    later = make(resumed)
    later.load_state_dict(copy.deepcopy(scheduler.state_dict()))
    seen = [each.param_groups[0]["lr"] for each in (trained, resumed)]
    differs |= seen[0] != seen[1]
    print(f"  {name}: learning rate {seen[0]:.5f}, resumed {seen[1]:.5f}")
sys.exit(differs)
