"""Faults of values other than tensors: hyperparameters, scheduler, counters, random generators."""

import math
from typing import TYPE_CHECKING

from dcpbench.config.groups import Expect, Only
from dcpbench.plugins.faults.registry import fault, on_one_rank

if TYPE_CHECKING:
    from dcpbench.plugins.faults.targets import Target

WITH_MOMENTS = {"optimizer": Only(["adam", "adamw", "adamw_groups"], "it needs two moments")}
A_WEIGHT, A_BIAS = r"[\w.]+\.weight", r"[\w.]+\.bias"
"""Patterns of parameter names in any model."""


def component(name: str) -> dict[str, Only]:
    """Limit a fault to cells with a component."""
    return {"component": Only([name], "it damages this component")}


@fault(Expect("optim_equal", r"param_groups\.0\.lr", 0), value=1.0)
def lr_not_restored(target: "Target", value: float) -> None:
    """Replace the learning rate of the first group."""
    target.param_groups[0]["lr"] = value


@on_one_rank(Expect("optim_equal", r"param_groups\.0\.lr", -2))
def lr_next_float(target: "Target") -> None:
    """Increase the learning rate of the first group to the next float."""
    group = target.param_groups[0]
    group["lr"] = math.nextafter(group["lr"], math.inf)


@on_one_rank(
    Expect("optim_equal", r"param_groups\.0\.initial_lr", -2, "missing"),
    Expect(phases=["load"], error="KeyError", message="initial_lr"),
)
def group_key_dropped(target: "Target") -> None:
    """Remove `initial_lr` from a group."""
    del target.param_groups[0]["initial_lr"]


@fault(
    Expect("optim_equal", r"param_groups\.0\.\w+", 0),
    only={"optimizer": Only(["adamw_groups", "adam_and_sgd"], "it needs two groups")},
)
def groups_exchanged(target: "Target") -> None:
    """Exchange the hyperparameters of two groups."""
    first, second = target.param_groups[:2]
    for key in (first.keys() & second.keys()) - {"params"}:
        first[key], second[key] = second[key], first[key]


@on_one_rank(Expect("extra_equal", r"grad_scaler\.scale", -2), only=component("grad_scaler"))
def grad_scale_doubled(target: "Target") -> None:
    """Double the scale of a GradScaler."""
    scaler = target.state["grad_scaler"]
    state = scaler.state_dict()
    scaler.load_state_dict({**state, "scale": 2 * state["scale"]})


@on_one_rank(Expect("extra_equal", r"data_loader\.[\w.]+", -2), only=component("data_loader"))
def sample_skipped(target: "Target") -> None:
    """Advance the data loader by one sample."""
    target.state["data_loader"].number_of_batch(1)


@on_one_rank(Expect("extra_equal", r"noise\.generator", -2))
def noise_one_draw_ahead(target: "Target") -> None:
    """Draw once more from the random generator."""
    target.state["noise"].like(target.state["tensor_object"].data)


@on_one_rank(Expect("random_equal", r"random\.rank\d+\.cpu", -2))
def generator_seeded_again(target: "Target") -> None:
    """Reset the default generators to a seed."""
    target.state["random"].seed(99)


@fault(Expect("random_equal", r"random\.rank\d+\.cpu"))
def generators_of_rank_0(target: "Target") -> None:
    """Give every rank the generators of rank 0."""
    target.state["random"].states = target.gathered(target.state["random"].states)[0]


@fault(Expect("extra_equal", r"scheduler\.last_epoch", 0))
def scheduler_one_epoch_behind(target: "Target") -> None:
    """Set the scheduler back by one epoch."""
    target.state["scheduler"].last_epoch -= 1


@fault(Expect("extra_equal", r"train_state\.step", 0))
def train_step_off_by_one(target: "Target") -> None:
    """Add one to the step counter of the training loop."""
    target.state["train_state"].step += 1
