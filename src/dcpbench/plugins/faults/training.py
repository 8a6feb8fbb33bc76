"""Faults of training under any parallelism: gradients that are not the mean over the ranks, samples trained
on twice, optimizer steps with wrong hyperparameters. Every parallel run of a cell has the fault and its twin
does not, so the state is restored correctly although training is wrong."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING
from unittest import mock

from dcpbench.config.groups import Expect, InjectedAt, Only
from dcpbench.plugins.faults.expected import NothingToInjectError
from dcpbench.plugins.faults.registry import fault

if TYPE_CHECKING:
    from dcpbench.plugins.faults.wrong_training import WrongTraining

_gradients = partial(fault, Expect("gradient_close"), at=InjectedAt.training)


@_gradients(name="gradients_summed", factor=None)
@_gradients(name="layer_gradient_scaled", factor=1.001, first_layer=True)
def gradients_scaled(target: "WrongTraining", factor: float | None, first_layer: bool = False) -> None:
    """Multiply gradients by a factor, all or those of the first layer that has any. The default factor is the
    number of ranks that share a batch, which makes the mean a sum."""
    times = factor or target.shares

    @contextmanager
    def scaled() -> Iterator[None]:
        yield
        gradients = target.gradients()
        for layer, gradient in gradients:
            if gradient is not None and (layer == gradients[0][0] or not first_layer):
                gradient.mul_(times)

    target.during("backward", scaled)


@_gradients(only={"parallel": Only(["ddp"], "other layouts cannot leave out the average")})
def gradients_not_averaged(target: "WrongTraining") -> None:
    """Leave each rank its local gradients, like a `no_sync` that is never left."""
    if target.shares:
        for module in target.run.model.modules():
            if "require_backward_grad_sync" in vars(module):
                vars(module)["require_backward_grad_sync"] = False


@_gradients(Expect("batch_loss_close"))
def share_trained_twice(target: "WrongTraining") -> None:
    """Replace the second share of each batch by the first."""
    run = target.run
    if target.shares and run.world.dp_rank(run.sizes) == 1:
        first = copy(run)
        first.world = replace(run.world, rank=0)
        run.share_of = first.share_of  # type: ignore[method-assign]


@fault(Expect("step_equal"), at=InjectedAt.training, name="eps_tenfold", key="eps", factor=10.0)
@fault(
    Expect("step_equal", rank=-2),
    at=InjectedAt.training,
    rank=-2,
    name="lr_off_on_one_rank",
    key="lr",
    factor=1.001,
)
def steps_otherwise(target: "WrongTraining", key: str, factor: float) -> None:
    """Multiply a hyperparameter during each step; the groups keep its correct value."""

    @contextmanager
    def changed() -> Iterator[None]:
        groups = [group for group in target.run.optimizer.param_groups if group.get(key)]
        if not groups:
            raise NothingToInjectError(f"no group has {key}")
        with ExitStack() as restored:
            for group in groups:
                restored.enter_context(mock.patch.dict(group, {key: group[key] * factor}))
            yield

    target.during("step", changed)
