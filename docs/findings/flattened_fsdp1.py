"""An optimizer under FSDP1 that is set from its own flattened state dict.

torchrun --nproc-per-node 2 flattened_fsdp1.py [--uneven]
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
from torch.distributed.fsdp import FullyShardedDataParallel

State = dict[str, torch.Tensor]


def momenta(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """A copy of what this rank's optimizer holds, by parameter name."""
    return {
        name.removeprefix("_fsdp_wrapped_module."): optimizer.state[parameter]["momentum_buffer"].clone()
        for name, parameter in model.named_parameters()
        if parameter.numel()
    }


def main() -> int:
    dist.init_process_group("gloo")
    wrong = 0
    for flattened in (False, True):
        options = StateDictOptions(flatten_optimizer_state_dict=flattened)
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 6 if "--uneven" in sys.argv else 4))
        model = FullyShardedDataParallel(layers, use_orig_params=True, device_id=torch.device("cpu"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model(torch.rand(3, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        before = momenta(model, optimizer)
        if dist.get_rank() == 0:
            print(f"torch {torch.__version__}, {'flattened' if flattened else 'by group'}", flush=True)
        state = get_optimizer_state_dict(model, optimizer, options=options)
        set_optimizer_state_dict(model, optimizer, state, options=options)
        after = momenta(model, optimizer)
        mine = {name: bool(torch.equal(value, after[name])) for name, value in before.items()}
        everybody: list = [None, None]
        dist.all_gather_object(everybody, mine)
        wrong += not all(mine.values())
        for rank, alike in enumerate(everybody if dist.get_rank() == 0 else []):
            for name, same in alike.items():
                print(f"  rank {rank}, {name}: {'the same' if same else 'differs'}", flush=True)
    dist.destroy_process_group()
    return wrong


if __name__ == "__main__":
    sys.exit(main())
