"""A save that changes what it saves: defects of the live state, right after a save has returned."""

from typing import TYPE_CHECKING

from dcpbench.config.groups import Expect, Place
from dcpbench.faults.registry import fault

if TYPE_CHECKING:
    from dcpbench.faults.targets import Target

_HARMED = Expect("save_harmless")


@fault(_HARMED, at=Place.live)
def save_nudges_weight(target: "Target") -> None:
    """The save leaves one weight larger than it was, on one rank."""
    if target.victim:
        target.largest_parameter().view(-1)[0].add_(0.01)


@fault(_HARMED, at=Place.live)
def save_takes_step(target: "Target") -> None:
    """The save counts as a step of the optimizer."""
    for step in target.moments("step").values():
        step.add_(1)


@fault(_HARMED, at=Place.live)
def save_draws_noise(target: "Target") -> None:
    """The save draws from the training's random generator."""
    target.state["noise"].like(target.state["tensor_object"].data)


@fault(_HARMED, at=Place.live)
def save_resets_lr(target: "Target") -> None:
    """The save leaves another learning rate."""
    target.param_groups[0]["lr"] = 0.05
