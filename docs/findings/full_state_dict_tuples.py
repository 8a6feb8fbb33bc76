"""An optimizer that is set from its own full state dict, also flattened.

python full_state_dict_tuples.py
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

print(f"torch {torch.__version__}")
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
wrong = 0
for full in (False, True):
    for flattened in (False, True):
        options = StateDictOptions(full_state_dict=full, flatten_optimizer_state_dict=flattened)
        model = nn.Linear(2, 2)
        optimizer = torch.optim.Adam(model.parameters(), betas=(0.8, 0.9))
        state = get_optimizer_state_dict(model, optimizer, options=options)
        try:
            set_optimizer_state_dict(model, optimizer, state, options=options)
            said = f"betas (0.8, 0.9), then {optimizer.param_groups[0]['betas']}"
        except KeyError as error:
            said = f"KeyError: {error}"
        wrong += not said.endswith("then (0.8, 0.9)")
        print(f"  {'full' if full else 'sharded'}{', flattened' if flattened else ''}: {said}")
dist.destroy_process_group()
sys.exit(wrong)
