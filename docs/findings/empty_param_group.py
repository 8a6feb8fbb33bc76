"""An optimizer with an empty parameter group, set from its own state dict.

python empty_param_group.py
"""

import sys

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

ORDERS = {
    "the empty group is the last": ["weight", "bias", "empty"],
    "the empty group is between": ["weight", "empty", "bias"],
    "the empty group is the first": ["empty", "weight", "bias"],
}
LR = {"weight": 0.1, "bias": 0.2, "empty": 0.3}


def differs(order: list[str], options: StateDictOptions) -> bool:
    """Whether the groups are others once they are set to what they are."""
    model = nn.Linear(2, 2)
    held = {"weight": [model.weight], "bias": [model.bias], "empty": []}
    optimizer = torch.optim.AdamW([{"params": held[name], "lr": LR[name]} for name in order])
    before = [len(group) for group in optimizer.param_groups]
    try:
        state = get_optimizer_state_dict(model, optimizer, options=options)
        set_optimizer_state_dict(model, optimizer, state, options=options)
    except (IndexError, ValueError) as error:
        print(f"    set: {type(error).__name__}: {error}")
        return True
    for name, group, had in zip(order, optimizer.param_groups, before, strict=True):
        print(f"    {name}: lr {LR[name]}, then {group.get('lr')}; {had} keys, then {len(group)}")
    model(torch.ones(1, 2)).sum().backward()
    try:
        optimizer.step()
    except KeyError as error:
        print(f"    step: KeyError: {error}")
        return True
    return [group["lr"] for group in optimizer.param_groups] != [LR[name] for name in order]


print(f"torch {torch.__version__}")
wrong = 0
for flattened in (False, True):
    for name, order in ORDERS.items():
        print(f"  {name}{', flattened' if flattened else ''}")
        wrong += differs(order, StateDictOptions(flatten_optimizer_state_dict=flattened))
sys.exit(wrong)
