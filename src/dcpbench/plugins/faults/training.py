"""Faults of training under any parallelism: gradients that are not the mean over the ranks, samples trained
on twice, optimizer steps with wrong hyperparameters. Every parallel run of a cell has the fault and its twin
does not, so the state is restored correctly although training is wrong."""

from functools import partial
from typing import TYPE_CHECKING

from dcpbench.config.groups import Expect, Only, Place
from dcpbench.plugins.faults.registry import fault

if TYPE_CHECKING:
    from dcpbench.plugins.faults.wrong_training import WrongTraining

_gradients = partial(fault, Expect("gradient_close"), at=Place.training)


@_gradients(name="gradients_summed", factor=None)
@_gradients(name="layer_gradient_scaled", factor=1.001, first_layer=True)
def gradients_scaled(target: "WrongTraining", factor: float | None, first_layer: bool = False) -> None:
    """Multiply gradients by a factor, all or those of the first layer that has any. The default factor is the
    number of ranks that share a batch, which makes the mean a sum."""
    target.scale_gradients(factor or target.shares, first_layer)


@_gradients(only={"parallel": Only(["ddp"], "other layouts cannot leave out the average")})
def gradients_not_averaged(target: "WrongTraining") -> None:
    """Leave each rank its local gradients, like a `no_sync` that is never left."""
    target.keep_local_gradients()


@_gradients(Expect("batch_loss_close"))
def share_trained_twice(target: "WrongTraining") -> None:
    """Replace the second share of each batch by the first."""
    target.repeat_first_share()


@fault(Expect("step_equal"), at=Place.training, name="eps_tenfold", key="eps", factor=10.0)
@fault(
    Expect("step_equal", rank=-2),
    at=Place.training,
    rank=-2,
    name="lr_off_on_one_rank",
    key="lr",
    factor=1.001,
)
def steps_otherwise(target: "WrongTraining", key: str, factor: float) -> None:
    """Multiply a hyperparameter during each step; the groups keep its correct value."""
    target.step_with(key, factor)
