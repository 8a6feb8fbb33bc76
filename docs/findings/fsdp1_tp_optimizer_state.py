"""get_optimizer_state_dict, then set_optimizer_state_dict, is not the identity under FSDP1 + TP.

    torchrun --nproc-per-node 4 fsdp1_tp_optimizer_state.py [--wrap W] [--optim O] [--patched]

Trains two steps on a 2-D mesh (dp=2, tp=2), copies this rank's part of ``optimizer.state``, gets the
optimizer's state dict and sets it straight back, and compares ``optimizer.state`` with the copy, bit for
bit. Exit status 1 if any entry differs. Both wrappers, FullyShardedDataParallel ("fsdp1") and fully_shard,
are run unless --wrap names one. With --patched, FSDP1 gathers a loaded DTensor over the data-parallel
dimension alone, which is what shows the cause.
"""

import argparse
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, _optim_utils, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

OPTIMIZERS = {
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net1 = nn.Linear(8, 16)
        self.net2 = nn.Linear(16, 32)
        self.net3 = nn.Linear(32, 64)
        self.net4 = nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.net1(x).relu()
        x = self.net2(x).relu()
        x = self.net3(x).relu()
        return self.net4(x)


def build(wrap: str, mesh: DeviceMesh, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    model = Net().to(device)
    parallelize_module(model, mesh["tp"], {"net1": ColwiseParallel(), "net2": RowwiseParallel()})
    if wrap == "fsdp1":
        return FullyShardedDataParallel(model, device_mesh=mesh["dp"], use_orig_params=True, device_id=device)
    fully_shard(model, mesh=mesh["dp"])
    return model


def live_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[tuple[str, str], torch.Tensor]:
    """A copy of what this rank's optimizer holds, by parameter name and state name."""
    copied = {}
    for name, param in model.named_parameters():
        fqn = name.replace("_fsdp_wrapped_module.", "")
        for key, value in optimizer.state.get(param, {}).items():
            local = value.to_local() if isinstance(value, DTensor) else torch.as_tensor(value)
            copied[fqn, key] = local.detach().clone()
    return copied


def gather_over_dp_alone(state: dict, pg: object = None, device: object = None) -> dict:
    """What FSDP1 would need of _gather_state_dict: the TP placement (the last one) stays as it is."""

    def gather(value: object) -> object:
        if not isinstance(value, DTensor):
            return value
        keep_tp = [Replicate()] * (value.device_mesh.ndim - 1) + [value.placements[-1]]
        return value.redistribute(placements=keep_tp).to_local()

    return {key: gather(value) for key, value in state.items()}


def differences(wrap: str, optim: str, mesh: DeviceMesh, device: torch.device) -> list[str]:
    model = build(wrap, mesh, device)
    optimizer = OPTIMIZERS[optim](model.parameters())
    torch.manual_seed(1 + mesh["dp"].get_local_rank())  # the ranks of one TP group see the same batch
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, 8, device=device)).square().sum().backward()
        optimizer.step()

    before = live_state(model, optimizer)
    set_optimizer_state_dict(model, optimizer, get_optimizer_state_dict(model, optimizer))
    after = live_state(model, optimizer)

    lines = []
    for fqn, key in sorted(before.keys() | after.keys()):
        old, new = before.get((fqn, key)), after.get((fqn, key))
        if old is None or new is None:
            lines.append(f"{fqn}.{key}: {'only after' if old is None else 'only before'}")
        elif old.shape != new.shape or old.dtype != new.dtype:
            lines.append(f"{fqn}.{key}: {tuple(old.shape)} {old.dtype} -> {tuple(new.shape)} {new.dtype}")
        elif not torch.equal(old, new):
            wrong, largest = (old != new).sum().item(), (old - new).abs().max().item()
            lines.append(f"{fqn}.{key}: {wrong} of {old.numel()} differ, by {largest:.3g} at most")
    return lines if before else ["no optimizer state at all"]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--wrap", choices=["fsdp1", "fully_shard", "both"], default="both")
    parser.add_argument("--optim", choices=sorted(OPTIMIZERS), default="adam")
    parser.add_argument("--patched", action="store_true")
    args = parser.parse_args()
    if args.patched:
        _optim_utils._gather_state_dict = gather_over_dp_alone

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("dp", "tp"))

    failed = False
    for wrap in ["fsdp1", "fully_shard"] if args.wrap == "both" else [args.wrap]:
        found = differences(wrap, args.optim, mesh, device)
        everyone: list = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (mesh.get_coordinate(), found))
        failed |= any(lines for _, lines in everyone)
        if rank == 0:
            print(f"{wrap} + TP, {args.optim}, torch {torch.__version__}, {device.type}")
            for at, ((dp, tp), lines) in enumerate(everyone):
                print(f"  rank {at} (dp {dp}, tp {tp}): {'differs' if lines else 'identical'}")
                for line in lines:
                    print(f"    {line}")
    dist.destroy_process_group()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
