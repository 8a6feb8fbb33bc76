"""Defects of the model's parameters and buffers after a load."""

import torch
import torch.distributed as dist

from dcpbench.faults.targets import Site, flip, largest
from dcpbench.verify.snapshot import TensorLeaf


def bit(site: Site, number: int) -> None:
    """One bit of one weight on one rank: 0 is one unit in the last place, 31 the sign."""
    if site.victim:
        flip(largest(site.parameters()), number)


def bias_bit(site: Site, number: int) -> None:
    """One bit of one bias on one rank."""
    if site.victim:
        flip(largest(_biases(site)), number)


def not_a_number(site: Site) -> None:
    """One weight on one rank is NaN."""
    if site.victim:
        largest(site.parameters()).view(-1)[0] = torch.nan


def zeroed(site: Site) -> None:
    """One tensor's part on one rank is all zeros."""
    if site.victim:
        largest(site.parameters()).zero_()


def initialised_again(site: Site) -> None:
    """One tensor's part on one rank is drawn anew."""
    if site.victim:
        part = largest(site.parameters())
        part.copy_(torch.rand(part.shape, generator=torch.Generator().manual_seed(99)))


def reversed_elements(site: Site) -> None:
    """One tensor's elements on one rank stand in the opposite order."""
    if site.victim:
        part = largest(site.parameters())
        part.copy_(part.reshape(-1).flip(0).reshape(part.shape))


def transposed(site: Site) -> None:
    """A square block of one weight on one rank is transposed."""
    if site.victim:
        part = largest(site.parameters())
        side = int(part.numel() ** 0.5)
        block = part.view(-1)[: side * side]
        block.copy_(block.reshape(side, side).t().reshape(-1).clone())


def rolled(site: Site) -> None:
    """One tensor's elements on one rank are one place further on."""
    if site.victim:
        part = largest(site.parameters())
        part.copy_(part.reshape(-1).roll(1).reshape(part.shape))


def elements_exchanged(site: Site) -> None:
    """Two elements of one tensor on one rank have each other's place."""
    if site.victim:
        flat = largest(site.parameters()).view(-1)
        flat[[0, -1]] = flat[[-1, 0]]


def rows_exchanged(site: Site) -> None:
    """The first and the last eight elements of one tensor on one rank have each other's place."""
    if site.victim:
        flat = largest(site.parameters()).view(-1)
        head, tail = flat[:8].clone(), flat[-8:].clone()
        flat[:8], flat[-8:] = tail, head


def tensors_exchanged(site: Site) -> None:
    """The two largest tensors' parts have each other's values on one rank, as far as both go."""
    if not site.victim:
        return
    one, other = (part.view(-1) for part in sorted(site.parameters().values(), key=torch.Tensor.numel)[-2:])
    common = min(one.numel(), other.numel())
    first, second = one[:common].clone(), other[:common].clone()
    one[:common], other[:common] = second, first


def shards_exchanged(site: Site) -> None:
    """Two ranks have each other's parts of the parameters, one after the other, as far as both go."""
    parts = list(site.parameters().values())
    everything = torch.cat([part.reshape(-1) for part in parts])
    theirs: list[torch.Tensor] = [everything for _ in range(site.world_size)]
    dist.all_gather_object(theirs, everything.cpu(), group=site.group)
    partner = {0: site.world_size - 1, site.world_size - 1: 0}.get(site.rank)
    if partner is None:
        return
    common = min(everything.numel(), theirs[partner].numel())
    everything[:common] = theirs[partner][:common].to(everything.device)
    for part, values in zip(parts, everything.split([part.numel() for part in parts]), strict=True):
        part.copy_(values.reshape(part.shape))


def of_earlier_checkpoint(site: Site) -> None:
    """One tensor's part on one rank is that of an earlier checkpoint."""
    if site.victim:
        name, part = max(site.parameters().items(), key=lambda item: item[1].numel())
        leaf = site.earlier[name]
        assert isinstance(leaf, TensorLeaf)
        part.copy_(leaf.local.reshape(part.shape))


def through(site: Site, dtype: str) -> None:
    """One tensor's part on one rank went through a narrower dtype and back."""
    if site.victim:
        part = largest(site.parameters())
        part.copy_(part.to(getattr(torch, dtype)).to(part.dtype))


def scaled(site: Site) -> None:
    """One replica has drifted: its weights are larger by two units in the last place or so."""
    if site.victim:
        largest(site.parameters()).mul_(1 + 2**-22)


def negated_zero(site: Site) -> None:
    """A zero has changed its sign: the element is zero, before on all ranks, and then -0.0 on one."""
    if site.victim:
        largest(_biases(site)).view(-1)[0].mul_(-1)


def frozen_changed(site: Site) -> None:
    """One element of a frozen parameter, on every rank that has a part of one."""
    part = largest({name: part for name, part in site.parameters().items() if name.startswith("pretrain.")})
    if part.numel():
        flip(part, 0)


def buffer_counts_one_more(site: Site) -> None:
    """An integer buffer is off by one on one rank."""
    if site.victim:
        site.buffers()["seen"].add_(1)


def buffer_bit(site: Site, number: int) -> None:
    """One bit of a float buffer on one rank."""
    if site.victim:
        flip(site.buffers()["gain"], number)


def buffer_zeroed(site: Site) -> None:
    """A buffer is not restored anywhere: zeros."""
    site.buffers()["gain"].zero_()


def _biases(site: Site) -> dict[str, torch.Tensor]:
    return {name: part for name, part in site.parameters().items() if name.endswith("bias")}
