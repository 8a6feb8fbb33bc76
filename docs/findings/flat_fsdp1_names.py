"""FSDP1 without use_orig_params: compiled, weights are loaded under each other's names.

    torchrun --nproc-per-node 2 flat_fsdp1_names.py

Builds a model of eight linear layers of one shape, wraps it in FullyShardedDataParallel with one flat
parameter, takes a step, and sets the state dicts of model and optimizer straight back: as it is, compiled,
with each layer compiled, and with each layer in a checkpoint wrapper. Prints how many layers have other
weights afterwards, or what was raised. Exit status 1 unless all of them have what they had.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel

LAYERS = 8


def build(case: str, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8, bias=False, device=device) for _ in range(LAYERS)]
    if case == "layers compiled":
        layers = [torch.compile(layer, backend="eager") for layer in layers]
    if case == "layers in checkpoint wrappers":
        layers = [checkpoint_wrapper(layer) for layer in layers]
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    model: nn.Module = FullyShardedDataParallel(
        nn.Sequential(*layers), device_mesh=mesh, use_orig_params=False, device_id=device
    )
    return torch.compile(model, backend="eager") if case == "compiled" else model


def weights(model: nn.Module) -> list[torch.Tensor]:
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return [whole[name].clone() for name in sorted(whole)]


def get_and_set(case: str, device: torch.device) -> str:
    model = build(case, device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model(torch.ones(4, 8, device=device)).sum().backward()
    optimizer.step()
    before = weights(model)
    try:
        set_model_state_dict(model, get_model_state_dict(model))
        others = sum(not torch.equal(*pair) for pair in zip(before, weights(model), strict=True))
    except RuntimeError as error:
        return f"model: {type(error).__name__}: {' '.join(str(error).split())[:110]}"
    became = "optimizer set"
    try:
        set_optimizer_state_dict(model, optimizer, get_optimizer_state_dict(model, optimizer))
    except (AssertionError, RuntimeError) as error:
        became = f"optimizer: {type(error).__name__}: {' '.join(str(error).split())[:110]}"
    return f"{others} of {LAYERS} layers have other weights, {became}"


def main() -> int:
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    good = f"0 of {LAYERS} layers have other weights, optimizer set"
    wrong = False
    for case in ("as it is", "compiled", "layers compiled", "layers in checkpoint wrappers"):
        result = get_and_set(case, device)
        wrong |= result != good
        if dist.get_rank() == 0:
            print(f"torch {torch.__version__}, {case}: {result}")
    dist.destroy_process_group()
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
