"""FSDP1 over a model that tensor parallelism has sharded trains the parameters that were frozen.

    torchrun --nproc-per-node 4 fsdp1_tp_unfreezes.py [--patched]

Freezes two layers of three, shards them by TP on a 2-D mesh (dp=2, tp=2), wraps the model, and trains
one step. Prints for each wrapper which frozen parameters require a gradient after wrapping and which of
them have changed. Exit status 1 if any has. With --patched, what FSDP1 makes of a DTensor keeps its flag,
which is what shows the cause.
"""

import argparse
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, _flat_param, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, fsdp, parallelize_module


def build(wrap: str, mesh: DeviceMesh, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 8)).to(
        device
    )
    model[0].requires_grad_(False)
    model[2].requires_grad_(False)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    if wrap == "fsdp1":
        return FullyShardedDataParallel(model, device_mesh=mesh["dp"], use_orig_params=True, device_id=device)
    fully_shard(model, mesh=mesh["dp"])
    return model


def frozen_parts(model: nn.Module) -> dict[str, tuple[bool, torch.Tensor]]:
    """Whether each parameter that was frozen requires a gradient now, and a copy of this rank's part."""
    found = {}
    for name, parameter in model.named_parameters():
        name = name.replace("_fsdp_wrapped_module.", "")
        if name.startswith(("0.", "2.")):
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            found[name] = (parameter.requires_grad, local.detach().clone())
    return found


def flatten_as_it_is(tensor: torch.Tensor) -> tuple:
    """What FSDP1 would need of _flatten_tensor: the shard requires a gradient if the DTensor does."""
    if isinstance(tensor, DTensor):
        tensor._local_tensor.requires_grad_(tensor.requires_grad)
        return tensor._local_tensor, tensor._spec
    return tensor, None


def parameters_as_they_are(tensors: list) -> list[nn.Parameter]:
    """What FSDP1 would need of _convert_to_params: a parameter requires a gradient if its tensor does."""
    return [
        tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, tensor.requires_grad)
        for tensor in tensors
    ]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--patched", action="store_true")
    if parser.parse_args().patched:
        fsdp._flatten_tensor = flatten_as_it_is
        _flat_param._convert_to_params = parameters_as_they_are
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("dp", "tp"))

    trained = False
    for wrap in ("fsdp1", "fully_shard"):
        model = build(wrap, mesh, device)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        before = frozen_parts(model)
        model(torch.ones(4, 8, device=device)).square().sum().backward()
        optimizer.step()
        after = frozen_parts(model)
        unfrozen = {name for name, (flag, _) in before.items() if flag}
        changed = {name for name, (_, part) in before.items() if not torch.equal(part, after[name][1])}
        everyone: list = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (unfrozen, changed))
        trained |= any(names for _, names in everyone)
        if dist.get_rank() == 0:
            flags, values = (sorted(set().union(*(seen[which] for seen in everyone))) for which in (0, 1))
            print(f"{wrap} + TP, torch {torch.__version__}, {device.type}")
            print(f"  frozen, but require a gradient: {', '.join(flags) or 'none'}")
            print(f"  frozen, but changed by a step:  {', '.join(values) or 'none'}")
    dist.destroy_process_group()
    return int(trained)


if __name__ == "__main__":
    sys.exit(main())
