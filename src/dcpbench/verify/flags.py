"""What decides how training goes on and is no value of the state: flags, modes, defaults, shared memory,
gradients."""

import torch
from torch import nn

from dcpbench.verify.snapshot import Leaves, TensorLeaf, named_parameters, plain_fqn, snapshot_nested


def snapshot_flags(
    model: nn.Module, optimizer: torch.optim.Optimizer, state: Leaves, gradients: bool = True
) -> Leaves:
    """Which parameters require a gradient and which modules are in training mode, by FQN; the optimizer's
    defaults and the keys of its groups; which of the tensors in `state` share memory; the gradients left, if
    these are asked for."""
    parameters = named_parameters(model)
    flags: Leaves = {f"requires_grad.{name}": value.requires_grad for name, value in parameters.items()}
    for name, module in model.named_modules(remove_duplicate=False):
        flags[f"training.model.{plain_fqn(model, f'{name}.')}".rstrip(".")] = module.training
    flags |= snapshot_nested(optimizer.defaults, "defaults.")
    for number, group in enumerate(optimizer.param_groups):
        flags[f"param_groups.{number}.keys"] = ", ".join(sorted(group))
    flags["shared_memory"] = "; ".join(", ".join(names) for names in sharing_memory(state))
    if not gradients:
        return flags
    left = {name: value.grad for name, value in parameters.items() if value.grad is not None}
    return {**flags, "gradients": ", ".join(left), **snapshot_nested(left, "gradients.")}


def sharing_memory(state: Leaves) -> list[list[str]]:
    """The names of tensors that lie at least in part in the same bytes, each set in the order of `state`.
    Parts of one storage that do not overlap, as FSDP1's views, share nothing."""
    places = []
    for order, (name, leaf) in enumerate(state.items()):
        if isinstance(leaf, TensorLeaf) and leaf.local.numel():
            begin, local = leaf.local.data_ptr(), leaf.local
            last = sum((size - 1) * stride for size, stride in zip(local.shape, local.stride(), strict=True))
            places.append((begin, begin + (last + 1) * local.element_size(), order, name))
    shared: list[list[tuple[int, str]]] = []
    reached = 0
    for begin, end, order, name in sorted(places):
        if begin >= reached:
            shared.append([])
        shared[-1].append((order, name))
        reached = max(reached, end)
    return sorted([name for _, name in sorted(one)] for one in shared if len(one) > 1)
