"""An optimizer's state that is loaded where the parameters are split into groups otherwise.

python other_param_groups.py
"""

import sys

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

LR = {"weight": 0.1, "bias": 0.2}


def build(model: nn.Linear, together: bool, lr: dict[str, float]) -> torch.optim.Optimizer:
    """Both parameters in one group, or each in one of its own."""
    if together:
        return torch.optim.AdamW([model.weight, model.bias], lr=lr["weight"])
    return torch.optim.AdamW([{"params": [getattr(model, name)], "lr": lr[name]} for name in LR])


def differs(saved_together: bool, options: StateDictOptions) -> bool:
    """Whether a parameter comes back with another learning rate than it was saved with."""
    model = nn.Linear(2, 2)
    saved = build(model, saved_together, LR)
    state = get_optimizer_state_dict(model, saved, options=options)
    loaded = build(model, not saved_together, {"weight": 0.7, "bias": 0.8})
    try:
        set_optimizer_state_dict(model, loaded, state, options=options)
    except (RuntimeError, ValueError, KeyError) as error:
        print(f"    refused: {type(error).__name__}: {error}")
        return False
    wrong = False
    for name in LR:
        parameter = getattr(model, name)
        before, after = (
            next(
                group.get("lr") for group in one.param_groups if any(parameter is p for p in group["params"])
            )
            for one in (saved, loaded)
        )
        print(f"    {name}: saved with lr {before}, has {after}")
        wrong |= before != after
    return wrong


print(f"torch {torch.__version__}")
wrong = 0
for flattened in (False, True):
    for saved_together in (True, False):
        one, other = ("one group", "two") if saved_together else ("two groups", "one")
        print(f"  saved in {one}, loaded in {other}{', flattened' if flattened else ''}")
        wrong += differs(saved_together, StateDictOptions(flatten_optimizer_state_dict=flattened))
sys.exit(wrong)
