"""The moments at which `fully_shard` reduces gradients, reproduced by hooks on a plain model.

In forward passes, modules have other leaves in place of their parameters, as `fully_shard` gives them the
parameters that it has gathered. A group of parameters that are sharded together reduces what the leaves have
accumulated when the inputs of its module get their gradients, and at the end of a backward pass in which they
got none. What is accumulated in between waits for the next backward pass."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

Gradients = dict[nn.Parameter, torch.Tensor]


class Reductions:
    """The groups of a model, until the hooks of its modules are removed.

    Args:
        groups: each module with the parameters that are sharded with it.
        late: the gradients that wait when it begins; changed in place.
    """

    def __init__(self, groups: Mapping[nn.Module, Iterable[nn.Parameter]], late: Gradients) -> None:
        self.late, self._is_backward = late, False
        self._groups = [_Group(self, *each) for each in groups.items()]

    def begin(self) -> None:
        """Begin a backward pass, unless it has begun."""
        if not self._is_backward:
            self._is_backward = True
            engine: Any = torch.autograd.Variable
            engine._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        self._is_backward = False
        for group in self._groups:
            group.end()


class _Group:
    """Parameters that are sharded together with a module."""

    def __init__(self, root: Reductions, module: nn.Module, parameters: Iterable[nn.Parameter]) -> None:
        self._root, self._is_done = root, False
        self._leaves: dict[nn.Parameter, nn.Parameter] = {}
        held = set(parameters)
        self._slots = [
            (owner, name, parameter)
            for owner in module.modules()
            for name, parameter in owner._parameters.items()
            if parameter in held and parameter is not None
        ]
        self._replaced: list[nn.Parameter | None] = []
        module.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        module.register_forward_hook(self._after_forward)

    def reduce(self) -> None:
        """Add what has been accumulated to the gradients of the parameters."""
        self._is_done = True
        for parameter, leaf in self._leaves.items():
            if leaf.grad is not None:
                reduced = leaf.grad.to(parameter.dtype)
                parameter.grad = reduced if parameter.grad is None else parameter.grad + reduced
                leaf.grad = None

    def end(self) -> None:
        """End a backward pass."""
        if not self._is_done:
            self.reduce()
        self._is_done = False
        for parameter, leaf in self._leaves.items():
            self._root.late.pop(parameter, None)
            if leaf.grad is not None:
                self._root.late[parameter] = leaf.grad

    def _before_forward(self, _: nn.Module, *inputs: Any) -> Any:
        self._is_done = False
        self._replaced = [owner._parameters[name] for owner, name, _ in self._slots]
        for (owner, name, parameter), value in zip(self._slots, self._replaced, strict=True):
            owner._parameters[name] = self._leaf(parameter, value)
        if not torch.is_grad_enabled() or not (tensors := _with_gradients(inputs)):
            return None
        marked = iter(_Reduces.apply(self, *tensors))  # type: ignore[no-untyped-call]
        return tree_map_only(torch.Tensor, lambda one: next(marked) if one.requires_grad else one, inputs)

    def _leaf(self, parameter: nn.Parameter, value: Any) -> nn.Parameter:
        """Return the leaf of a parameter, with this value: it can have been cast."""
        if parameter not in self._leaves:
            self._leaves[parameter] = nn.Parameter(torch.empty_like(value), parameter.requires_grad)
            self._leaves[parameter].grad = self._root.late.get(parameter)
        leaf = self._leaves[parameter]
        leaf.data.copy_(value)  # which is no new version of it
        return leaf

    def _after_forward(self, _: nn.Module, __: Any, output: Any) -> None:
        self._is_done = False
        for (owner, name, _parameter), replaced in zip(self._slots, self._replaced, strict=True):
            owner._parameters[name] = replaced
        for one in _with_gradients(output) if torch.is_grad_enabled() else ():
            one.register_hook(self._before_backward)

    def _before_backward(self, _: torch.Tensor) -> None:
        self._root.begin()
        self._is_done = False


class _Reduces(torch.autograd.Function):
    """Returns its inputs; when they get gradients, their group reduces."""

    @staticmethod
    def forward(ctx: Any, group: _Group, *inputs: torch.Tensor) -> Any:
        ctx.group = group
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.group.reduce()
        return None, *gradients


def _with_gradients(values: Any) -> list[torch.Tensor]:
    return [one for one in tree_leaves(values) if isinstance(one, torch.Tensor) and one.requires_grad]
