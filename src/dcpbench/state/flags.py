"""Settings that affect training but are not values of the state: flags, modes, defaults, shared memory,
gradients and hooks."""

import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from dcpbench.core.state import Name, text_of
from dcpbench.state.layout import ParameterParts
from dcpbench.state.snapshot import Leaves, TensorLeaf, named_parts, plain_fqn, snapshot_nested
from dcpbench.torch_private import HOOKS_OF_TENSORS, PRIVATE_MODULES

_OF_TENSORS = tuple(hooks.name for hooks in HOOKS_OF_TENSORS)
_CONTAINERS = {dict, OrderedDict, list, tuple}
_OF_PARALLELISMS = ("torch.distributed.", PRIVATE_MODULES)
"""Modules whose hooks depend on the layout and on whether a step was taken."""

HOOKS: Name = ("hooks", "model")
"""The name of the hooks on modules and parameters."""


def snapshot_flags(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: Leaves,
    gradients: bool = True,
    parts: ParameterParts | None = None,
) -> Leaves:
    """Return, by name, which parameters require a gradient, which modules are in training mode, the
    optimizer's defaults and the keys of its groups, which tensors in `state` share memory, and the hooks that
    do not belong to a parallelism.

    Args:
        gradients: include the gradients.
        parts: `named_parts` of the model, if they are known.
    """
    parts = parts or named_parts(model)
    parameters = {name: part.parameter for name, part in parts.items()}
    flags: Leaves = {
        ("requires_grad", name): parameter.requires_grad for name, parameter in parameters.items()
    }
    hooks = [hook for name, parameter in parameters.items() for hook in _hooks(name, parameter)]
    for name, module in model.named_modules(remove_duplicate=False):
        fqn = plain_fqn(model, name) if name else ""
        flags["training", f"model.{fqn}" if fqn else "model"] = module.training
        hooks += _hooks(fqn, module)
    several = getattr(optimizer, "optimizers", None) or [optimizer]
    of_optimizers = [hook for each_optimizer in several for hook in _hooks("", each_optimizer)]
    flags |= {HOOKS: "; ".join(hooks), ("hooks", "optimizer"): "; ".join(of_optimizers)}
    for number, inner in enumerate(several):
        # `Optimizer.__setstate__` adds it on a load, even to an optimizer without this option.
        defaults = {"differentiable": False, **inner.defaults}
        flags |= snapshot_nested(defaults, ("defaults", number) if len(several) > 1 else ("defaults",))
    for number, group in enumerate(optimizer.param_groups):
        flags["param_groups", number, "keys"] = ", ".join(sorted(group))
    flags["shared_memory",] = "; ".join(", ".join(names) for names in sharing_memory(state))
    if not gradients:
        return flags
    left = snapshot_gradients(parts)
    return {**flags, ("gradients",): ", ".join(text_of(name[1:]) for name in left), **left}


def snapshot_gradients(parts: ParameterParts) -> Leaves:
    """Return the gradients of these parts as ("gradients", FQN); sparse ones are made dense."""
    gradients = ((name, part, part.parameter.grad) for name, part in parts.items())
    left = {name: part.of(gradient) for name, part, gradient in gradients if gradient is not None}
    dense = {name: gradient.to_dense() if gradient.is_sparse else gradient for name, gradient in left.items()}
    return snapshot_nested(dense, ("gradients",))


def _hooks(name: str, owner: object) -> list[str]:
    """Return the hooks on a module, a parameter or an optimizer in the order of their calls: kind and
    code."""
    if isinstance(owner, torch.Tensor):
        kinds = [(kind, hooks) for kind in _OF_TENSORS if (hooks := getattr(owner, kind))]
    else:  # most are empty, which takes less to find out than the kind
        kinds = [
            attribute
            for attribute in vars(owner).items()
            if type(attribute[1]) not in _CONTAINERS or attribute[1]
        ]
    texts = list[str]()
    for kind, hooks in kinds:
        is_known = type(hooks) in _CONTAINERS
        if kind[-6:] == "_hooks" and (is_known or isinstance(hooks, Mapping | list | tuple)) and hooks:
            # DDP lists each communication hook with its state; they belong to the layout.
            called = hooks.values() if isinstance(hooks, Mapping) else hooks
            codes = [_code_of(hook) for hook in called if callable(hook)]
            texts += (
                f"{name} {kind} {code}".lstrip() for code in codes if not code.startswith(_OF_PARALLELISMS)
            )
    return texts


def _code_of(hook: Callable[..., Any]) -> str:
    """Return module, qualified name and line of a function or method, or the class of another callable."""
    if hasattr(hook, "__wrapped__"):
        hook = inspect.unwrap(hook)
    if isinstance(hook, functools.partial):
        return _code_of(hook.func)
    named: Any = hook if hasattr(hook, "__qualname__") else type(hook)
    line = getattr(getattr(hook, "__code__", None), "co_firstlineno", None)
    return f"{named.__module__}.{named.__qualname__}{f':{line}' if line else ''}"


def _span(tensor: torch.Tensor) -> int:
    """Return the number of bytes from a tensor's first element to the end of its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def sharing_memory(state: Leaves) -> list[list[str]]:
    """Return the names of tensors whose bytes overlap, each set in the order of `state`. Parts of one storage
    that do not overlap, such as FSDP1's views, share nothing."""
    local_of = ((order, leaf.local) for order, leaf in enumerate(state.values()) if type(leaf) is TensorLeaf)
    places = [
        (local.data_ptr(), local.nbytes if local.is_contiguous() else _span(local), order)
        for order, local in local_of
        if local.nbytes
    ]
    places.sort()
    names, shared = [*state], dict[int, list[int]]()
    first = reached = 0
    for begin, length, order in places:
        if begin < reached:
            shared.setdefault(first, [first]).append(order)
        else:
            first = order
        reached = begin + length if begin + length > reached else reached
    return sorted([text_of(names[order]) for order in sorted(orders)] for orders in shared.values())
