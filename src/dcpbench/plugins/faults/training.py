"""Faults of training under any parallelism: gradients that are not the mean over the ranks, samples trained
on twice, optimizer steps with wrong hyperparameters. Every parallel run of a cell has the fault and its twin
does not, so the state is restored correctly although training is wrong."""

from functools import partial
from typing import TYPE_CHECKING

from dcpbench.config.groups import Expect, Place
from dcpbench.plugins.faults.registry import fault
from dcpbench.plugins.faults.values import A_WEIGHT

if TYPE_CHECKING:
    from dcpbench.plugins.faults.wrong_training import WrongTraining

_gradients = partial(fault, Expect("gradient_close"), at=Place.training)
_steps = partial(fault, at=Place.training)
_on_one_rank = partial(fault, at=Place.training, on_one_rank=True)


@_gradients(name="gradients_summed", factor=None)
@_gradients(name="gradients_divided_too_much", factor=1 / 1.01)
@_gradients(name="layer_gradient_scaled", factor=1.001, first_layer=True)
def gradients_scaled(target: "WrongTraining", factor: float | None, first_layer: bool = False) -> None:
    """Multiply gradients by a factor, all or those of the first layer that has any. The default factor is the
    number of ranks that share a batch, which makes the mean a sum."""
    target.scale_gradients(factor or target.shares, first_layer)


@_gradients(name="gradients_not_averaged", among=1)
@_gradients(name="gradients_of_wrong_ranks", among=2)
def gradients_averaged_among(target: "WrongTraining", among: int) -> None:
    """Average gradients over too few ranks: over one, so that each rank keeps its local gradients, or over
    two of several. With HSDP, average them only within a replica."""
    target.average_among(among)


@fault(Expect("gradient_close"), Expect("batch_loss_close"), at=Place.training)
def share_trained_twice(target: "WrongTraining") -> None:
    """Replace the second share of each batch by the first."""
    target.repeat_first_share()


@_steps(Expect("step_equal", A_WEIGHT), name="decay_missing", has_elements=False)
@_on_one_rank(Expect("step_equal", A_WEIGHT, -2), name="decay_missing_on_one_rank", has_elements=True)
def weight_not_decayed(target: "WrongTraining", has_elements: bool) -> None:
    """Step one weight without weight decay."""
    target.step_without_decay_of("*.weight", has_elements)


@_steps(Expect("step_equal"), name="eps_tenfold", key="eps", factor=10.0)
@_on_one_rank(Expect("step_equal", rank=-2), name="lr_off_on_one_rank", key="lr", factor=1.001)
def steps_otherwise(target: "WrongTraining", key: str, factor: float) -> None:
    """Multiply a hyperparameter during each step; the groups keep its correct value."""
    target.step_with(key, factor)
