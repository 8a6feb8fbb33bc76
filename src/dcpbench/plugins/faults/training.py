"""Defects of training itself, under any parallelism: gradients that are not the mean of the ranks', samples
that are trained on twice, optimizer steps with other hyperparameters. Every parallel run of a cell has them,
and its twin has not: what was saved comes back, and training is wrong all the same."""

from functools import partial
from typing import TYPE_CHECKING

from dcpbench.config.groups import Expect, Place
from dcpbench.plugins.faults.registry import fault
from dcpbench.plugins.faults.values import A_WEIGHT

if TYPE_CHECKING:
    from dcpbench.plugins.faults.wrong_training import WrongTraining

_gradients = partial(fault, Expect("gradient_close"), at=Place.training)
_steps = partial(fault, at=Place.training)
_of_one_rank = partial(fault, at=Place.training, on_one_rank=True)


@_gradients(name="gradients_summed", factor=None)
@_gradients(name="gradients_divided_too_much", factor=1 / 1.01)
@_gradients(name="layer_gradient_scaled", factor=1.001, first_layer=True)
def gradients_scaled(target: "WrongTraining", factor: float | None, first_layer: bool = False) -> None:
    """Gradients are multiplied: by the number of ranks that share a batch, which makes the mean a sum, or by
    a factor, or only those of the first layer that has any."""
    target.scale_gradients(factor or target.shares, first_layer)


@_gradients(name="gradients_not_averaged", among=1)
@_gradients(name="gradients_of_wrong_ranks", among=2)
def gradients_averaged_among(target: "WrongTraining", among: int) -> None:
    """Gradients are averaged over few ranks: over a single one, so that each goes on with its own; or over
    two of several, with HSDP over those of a replica alone."""
    target.average_among(among)


@fault(Expect("gradient_close"), Expect("batch_loss_close"), at=Place.training)
def share_trained_twice(target: "WrongTraining") -> None:
    """The second share of each batch is the first one once more."""
    target.repeat_first_share()


@_steps(Expect("step_equal", A_WEIGHT), name="decay_missing", has_elements=False)
@_of_one_rank(Expect("step_equal", A_WEIGHT, -2), name="decay_missing_on_one_rank", has_elements=True)
def weight_not_decayed(target: "WrongTraining", has_elements: bool) -> None:
    """One weight has no weight decay."""
    target.step_without_decay_of("*.weight", has_elements)


@_steps(Expect("step_equal"), name="eps_tenfold", key="eps", factor=10.0)
@_of_one_rank(Expect("step_equal", rank=-2), name="lr_off_on_one_rank", key="lr", factor=1.001)
def steps_otherwise(target: "WrongTraining", key: str, factor: float) -> None:
    """Steps are taken with a hyperparameter multiplied, which no group shows."""
    target.step_with(key, factor)
