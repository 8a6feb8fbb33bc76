"""What a cell trains, and how: made of the groups `model` and `optimizer`, or by a function of one's own."""

import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau, StepLR

from dcpbench.config.schema import Config
from dcpbench.core.rank_report import Skip
from dcpbench.workloads.optimizers import each_of

Tensors = Any
"""A tensor, or a dictionary, list or tuple of them, or of these."""


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """Adam with its defaults."""
    return torch.optim.Adam(model.parameters())


def by_step(optimizer: torch.optim.Optimizer) -> LRScheduler:
    """A learning rate that becomes less with each step."""
    return StepLR(optimizer, step_size=1, gamma=0.95)


def next_step(scheduler: LRScheduler, loss: float) -> None:
    """Step a scheduler, with the loss of the step that was taken where it goes by that."""
    if isinstance(scheduler, ReduceLROnPlateau):
        scheduler.step(loss)
    else:
        scheduler.step()


@dataclass(frozen=True)
class Workload:
    """A model and how it is trained.

    Args:
        model: the plain model, which the parallelism of the cell then wraps.
        batch: draws the global batch of a step, `batch(generator)` with a `torch.Generator` on the CPU. The
            first dimension of every tensor is that of the samples; data-parallel ranks share them evenly.
        loss: `loss(model, share)` of the wrapped model and a rank's share of the batch, the mean over its
            samples.
        optimizer: `optimizer(model)` of the wrapped model; a list, where there are several.
        scheduler: `scheduler(optimizer)`; it is stepped after each step, a `ReduceLROnPlateau` with the mean
            loss of all ranks.
    """

    model: nn.Module
    batch: Callable[[torch.Generator], Tensors]
    loss: Callable[[nn.Module, Tensors], torch.Tensor]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer | list[torch.optim.Optimizer]] = adam
    scheduler: Callable[[torch.optim.Optimizer], LRScheduler] = by_step


def workload_of(config: Config) -> Workload:
    """The workload of a cell: what `workload.target` returns, if one is given.

    Raises:
        TypeError: that is no `Workload`.
    """
    if config.workload.target is None:
        return of_groups(config)
    made = pkgutil.resolve_name(config.workload.target)(**config.workload.options)
    if not isinstance(made, Workload):
        raise TypeError(
            f"workload.target={config.workload.target}: returned a {type(made).__name__}, no Workload"
        )
    return replace(made, optimizer=partial(_without_closure, made.optimizer))


def _without_closure(make: Callable[[nn.Module], Any], model: nn.Module) -> Any:
    """What it makes.

    Raises:
        Skip: it is an optimizer whose `step` needs a closure.
    """
    made = make(model)
    for one in made if isinstance(made, list) else [made]:
        closure = inspect.signature(one.step).parameters.get("closure")
        if closure and closure.default is closure.empty:
            kind = type(one).__name__
            raise Skip(
                f"torch's get_optimizer_state_dict calls step() without a closure, which {kind} refuses, and "
                "so does the training loop of a Workload; use checkpointer=trainer"
            )
    return made


def of_groups(config: Config) -> Workload:
    """The model of the group `model`, trained towards random targets by the optimizer of the group
    `optimizer` and the scheduler of the group `scheduler`. Targets lie in [1, 2): away from zero, so that the
    loss is."""
    model: Any = pkgutil.resolve_name(config.model.target)(**config.model.options)
    size = config.model.batch_size

    def batch(generator: torch.Generator) -> Tensors:
        inputs = torch.rand(size, model.input_size, generator=generator, device="cpu")
        return inputs, 1 + torch.rand(size, model.output_size, generator=generator, device="cpu")

    def loss(wrapped: nn.Module, share: Tensors) -> torch.Tensor:
        inputs, targets = share
        # In one dtype: torch 2.11 has no gradient of a loss of two.
        return F.mse_loss(wrapped(inputs).to(targets.dtype), targets)

    def optimizer(wrapped: nn.Module) -> torch.optim.Optimizer:
        groups = pkgutil.resolve_name(config.optimizer.groups)(wrapped)
        made: torch.optim.Optimizer = pkgutil.resolve_name(config.optimizer.target)(
            groups, **config.optimizer.hyperparameters()
        )
        foreach = config.parallel.foreach and config.loading.foreach
        for one in each_of(made):
            one.register_step_post_hook(_let_go)
            if not foreach:
                _take_one_by_one(one)
        return made

    scheduler = partial(pkgutil.resolve_name(config.scheduler.target), **config.scheduler.options)
    return Workload(model, batch, loss, optimizer, scheduler)


def _let_go(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Free the gradients right after a step, in a hook as trainers have them."""
    optimizer.zero_grad()


def _take_one_by_one(optimizer: torch.optim.Optimizer) -> None:
    """Have it take one parameter at a time, unless it is told how."""
    for options in (optimizer.defaults, *optimizer.param_groups):
        if options.get("foreach", True) is None and not options.get("fused"):
            options["foreach"] = False


def each_tensor(change: Callable[[torch.Tensor], torch.Tensor], tensors: Tensors) -> Tensors:
    """The same structure with every tensor changed, in their order."""
    if isinstance(tensors, torch.Tensor):
        return change(tensors)
    if isinstance(tensors, dict):
        return {name: each_tensor(change, value) for name, value in tensors.items()}
    if isinstance(tensors, list | tuple):
        return type(tensors)(each_tensor(change, value) for value in tensors)
    return tensors
