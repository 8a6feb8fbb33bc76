"""Defects of what is saved beside model and optimizer, after a load."""

import math
from typing import TYPE_CHECKING

from dcpbench.config.groups import Expect
from dcpbench.faults.registry import fault

if TYPE_CHECKING:
    from dcpbench.faults.targets import Target


def _extra(name: str, rank: int = 0, problem: str | None = None) -> Expect:
    return Expect("extra_equal", name.replace(".", r"\."), rank, problem)


@fault(_extra("noise.generator", -2))
def noise_seeded_again(target: "Target") -> None:
    """The random generator starts over, on one rank."""
    if target.victim:
        target.state["noise"].generator.manual_seed(0)


@fault(_extra("noise.generator", -2))
def noise_one_draw_ahead(target: "Target") -> None:
    """The random generator has drawn once more than it had, on one rank."""
    if target.victim:
        target.state["noise"].like(target.state["tensor_object"].data)


@fault(_extra("scheduler.last_epoch"))
def scheduler_one_epoch_behind(target: "Target") -> None:
    """The scheduler's epoch."""
    target.state["scheduler"].last_epoch -= 1


@fault(_extra("scheduler.gamma", -2))
def scheduler_gamma(target: "Target") -> None:
    """A constant of the scheduler, on one rank."""
    if target.victim:
        target.state["scheduler"].gamma = 0.5


@fault(_extra("scheduler.step_size", -2))
def scheduler_type(target: "Target") -> None:
    """An integer of the scheduler is a float of the same value, on one rank."""
    if target.victim:
        target.state["scheduler"].step_size = float(target.state["scheduler"].step_size)


@fault(_extra("scheduler.base_lrs"))
def scheduler_base_lr(target: "Target") -> None:
    """One of the scheduler's base learning rates."""
    target.state["scheduler"].base_lrs[-1] *= 2


@fault(_extra("train_state.step"))
def train_step_off_by_one(target: "Target") -> None:
    """The training's own step counter."""
    target.state["train_state"].step += 1


@fault(_extra("train_state.losses", -2))
def loss_next_float(target: "Target") -> None:
    """One loss in the history, by one unit in the last place, on one rank."""
    if target.victim:
        losses = target.state["train_state"].losses
        losses[0] = math.nextafter(losses[0], math.inf)


@fault(_extra("train_state.losses"))
def losses_forgotten(target: "Target") -> None:
    """The history of losses is empty."""
    target.state["train_state"].losses = []


@fault(_extra("train_state.current_loss"))
def current_loss_nan(target: "Target") -> None:
    """The last loss is NaN."""
    target.state["train_state"].current_loss = math.nan


@fault(_extra("tensor_object.data"))
def object_zeroed(target: "Target") -> None:
    """The stateful object's tensor."""
    target.state["tensor_object"].data.zero_()


@fault(_extra("tensor_object.data", -2), number=0)
def object_lowest_bit(target: "Target", number: int) -> None:
    """One bit of the stateful object's tensor on one rank."""
    if target.victim:
        target.flip(target.state["tensor_object"].data, number)


@fault(_extra("tensor_object.data", 0, "dtype"))
def object_dtype(target: "Target") -> None:
    """The stateful object's tensor has the same values in a wider dtype."""
    target.state["tensor_object"].data = target.state["tensor_object"].data.double()


@fault(
    _extra("tensor_object.data", 0, "shape"),
    Expect(phases=["load"], error="ValueError", message="Size mismatch .*tensor_object"),
)
def object_shape(target: "Target") -> None:
    """The stateful object's tensor has the same elements in another shape."""
    target.state["tensor_object"].data = target.state["tensor_object"].data.reshape(-1)
