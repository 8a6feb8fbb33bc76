"""The moments in which a step uses gradients, and the gradients there."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn.utils import clip_grad

from dcpbench.core.rank_report import Skip
from dcpbench.verify.snapshot import local_part, named_parts, parts_of_each


@dataclass(frozen=True)
class Use:
    """A use of gradients in a step.

    Args:
        by: the optimizer that steps on them, or that a function of torch clips them.
        gradients: this rank's parts, by FQN.
        full: full gradients, from all ranks.
    """

    by: str
    gradients: Mapping[str, torch.Tensor]
    full: Mapping[str, torch.Tensor] = field(default_factory=dict)


Note = Callable[[str, list[nn.Parameter]], None]
"""Is called before each use of gradients, with `Use.by` and the parameters."""


def gradients_of(model: nn.Module, parameters: Iterable[nn.Parameter]) -> dict[str, torch.Tensor]:
    """Return this rank's gradients of these parameters of a model, by FQN."""
    wanted = {id(value) for value in parameters}
    return {
        name: part.of(part.parameter.grad)
        for parts in parts_of_each(named_parts(model)).values()
        for name, part in parts.items()
        if part.parameter.grad is not None and id(part.parameter) in wanted
    }


def copied_to(uses: list[Use], model: nn.Module) -> Note:
    """Return a function that appends a copy of a model's gradients at each use of them."""

    def note(by: str, parameters: list[nn.Parameter]) -> None:
        gradients = gradients_of(model, parameters).items()
        uses.append(Use(by, {name: gradient.detach().clone() for name, gradient in gradients}))

    return note


@contextmanager
def each_use(
    optimizers: Sequence[torch.optim.Optimizer], parameters: Sequence[nn.Parameter], note: Note
) -> Iterator[None]:
    """Context manager: call `note` before an optimizer steps, and before torch clips gradients."""
    grouped = clip_grad._group_tensors_by_device_and_dtype

    def clipping(tensors: Any, *args: Any, **options: Any) -> Any:
        clipped = {_place(one) for several in tensors for one in several}
        note("clipping", [one for one in parameters if one.grad is not None and _place(one.grad) in clipped])
        return grouped(tensors, *args, **options)

    def stepping(number: int, optimizer: torch.optim.Optimizer, args: Any, options: Any) -> None:
        if any(one is not None for one in (*args[1:], options.get("closure"))):
            raise Skip(
                "step: an optimizer's step has a closure; call backward() before it, and step() without one; "
                "if it needs one, use checkpointer=trainer"
            )
        several = [one for group in optimizer.param_groups for one in group["params"]]
        note(f"optimizer {number}" if len(optimizers) > 1 else "the optimizer", several)

    with ExitStack() as hooks:
        # All functions that clip call this one, however a module has imported them.
        hooks.enter_context(mock.patch.object(clip_grad, "_group_tensors_by_device_and_dtype", clipping))
        for number, one in enumerate(optimizers):
            hooks.callback(one.register_step_pre_hook(partial(stepping, number)).remove)
        yield


def _place(gradient: torch.Tensor) -> int:
    """Return a number that a gradient has in common with views of it, such as the local part of a DTensor."""
    return id(gradient) if gradient.is_sparse else local_part(gradient).data_ptr()


def names_of_uses(uses: Sequence[Use]) -> list[str]:
    """Return the words that follow the name of a gradient in each use; none in an only one."""
    if len(uses) == 1:
        return [""]
    all_by = [one.by for one in uses]
    names = []
    for number, by in enumerate(all_by):
        several = all_by.count(by) > 1
        names.append(f" before {by}" + (f", use {1 + all_by[:number].count(by)}" if several else ""))
    return names
