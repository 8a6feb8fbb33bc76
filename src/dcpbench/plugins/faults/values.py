"""Faults of values other than tensors: hyperparameters, scheduler, counters, random generators."""

import math
from typing import TYPE_CHECKING, Any

from dcpbench.config.groups import Expect, Only
from dcpbench.plugins.faults.registry import fault, live, on_one_rank

if TYPE_CHECKING:
    from dcpbench.plugins.faults.targets import Target

WITH_MOMENTS = {"optimizer": Only(["adam", "adamw", "adamw_groups"], "it needs two moments")}
SCHEDULED = {
    "load_into": Only(["default", "never_stepped", "gradients"], "it needs a scheduler before the load")
}
_BY_STEP = {**SCHEDULED, "scheduler": Only(["step"], "it needs a StepLR")}
A_WEIGHT, A_BIAS = r"[\w.]+\.weight", r"[\w.]+\.bias"
"""Patterns of parameter names in any model."""
_WITH_GROUPS = {"optimizer": Only(["adamw_groups"], "it needs two groups")}

_TWO_GROUPS = {"optimizer": Only(["adamw_groups", "adam_and_sgd"], "it needs two groups")}

_SEVERAL_RANKS = {
    "parallel": Only(
        ["ddp", "fsdp", "hsdp", "fsdp_tp", "fsdp2", "hsdp2", "fsdp2_tp"], "it needs several ranks"
    )
}


def _group(key: str, rank: int | None = 0, number: int = 0, problem: str | None = None) -> Expect:
    return Expect("optim_equal", rf"param_groups\.{number}\.{key}", rank, problem)


def component(name: str) -> dict[str, Only]:
    """Limit a fault to cells with a component."""
    return {"component": Only([name], "it damages this component")}


def _extra(name: str, rank: int = 0) -> Expect:
    return Expect("extra_equal", name.replace(".", r"\."), rank)


@fault(_group("amsgrad"), name="amsgrad_not_restored", only=WITH_MOMENTS, key="amsgrad", value=None)
@fault(_group("betas"), name="betas_not_restored", only=WITH_MOMENTS, key="betas", value=[0.8, 0.88])
@fault(_group("eps"), name="eps_not_restored", only=WITH_MOMENTS, key="eps", value=1e-06)
@fault(_group("initial_lr"), name="initial_lr_not_restored", key="initial_lr", value=1.0)
@fault(_group("lr"), name="lr_not_restored", key="lr", value=1.0)
@fault(_group("weight_decay"), name="weight_decay_not_restored", key="weight_decay", value=0.5)
@fault(_group("lr", number=1), name="lr_of_second_group", only=_TWO_GROUPS, key="lr", value=0.3, group=1)
@fault(
    _group("weight_decay", number=1),
    name="weight_decay_of_second_group",
    only=_WITH_GROUPS,
    key="weight_decay",
    value=0.01,
    group=1,
)
@live(name="save_resets_lr", key="lr", value=0.05)
@on_one_rank(
    _group("momentum", rank=None),
    Expect(phases=["load"], error="RuntimeError", message=r"param_groups\.0\.momentum"),
    name="group_key_added",
    only=WITH_MOMENTS,
    key="momentum",
    value=0.9,
)
def hyperparameter(target: "Target", key: str, value: Any, group: int = 0) -> None:
    """Change one hyperparameter of one group, or add one that was never saved."""
    target.param_groups[group][key] = tuple(value) if hasattr(value, "__iter__") else value


@on_one_rank(_group("lr", rank=-2))
@on_one_rank(_group("lr", rank=0), name="lr_on_rank_0", rank=0)
@on_one_rank(_group("lr", rank=3), name="lr_on_rank_3", rank=3)
def lr_next_float(target: "Target") -> None:
    """Increase the learning rate of the first group to the next float."""
    group = target.param_groups[0]
    group["lr"] = math.nextafter(group["lr"], math.inf)


@on_one_rank(
    _group("initial_lr", rank=-2, problem="missing"),
    Expect(phases=["load"], error="KeyError", message="initial_lr"),
)
def group_key_dropped(target: "Target") -> None:
    """Remove `initial_lr` from a group."""
    del target.param_groups[0]["initial_lr"]


@on_one_rank(_extra("grad_scaler.scale", -2), only=component("grad_scaler"))
def grad_scale_doubled(target: "Target") -> None:
    """Double the scale of a GradScaler."""
    scaler = target.state["grad_scaler"]
    state = scaler.state_dict()
    scaler.load_state_dict({**state, "scale": 2 * state["scale"]})


@on_one_rank(Expect("extra_equal", r"data_loader\.[\w.]+", -2), only=component("data_loader"))
def sample_skipped(target: "Target") -> None:
    """Advance the data loader by one sample."""
    target.state["data_loader"].number_of_batch(1)


@fault(_group(r"\w+"), only=_WITH_GROUPS)
def groups_exchanged(target: "Target") -> None:
    """Exchange the hyperparameters of two groups."""
    one, other = target.param_groups[:2]
    for key in one.keys() - {"params"}:
        one[key], other[key] = other[key], one[key]


@on_one_rank(
    Expect("model_equal", r"([\w.]+\.)?_extra_state\.\w+", -2),
    only={"model": Only(["extra_state"], "it needs extra state")},
)
def extra_state_forgotten(target: "Target") -> None:
    """Change the extra state of a module."""
    target.forget_extra_state()


@on_one_rank(_extra("noise.generator", -2))
def noise_seeded_again(target: "Target") -> None:
    """Reset the random generator to a seed."""
    target.state["noise"].generator.manual_seed(0)


@on_one_rank(_extra("noise.generator", -2), name="noise_one_draw_ahead")
@on_one_rank(_extra("noise.generator", 1), name="noise_on_rank_1", rank=1)
@live(name="save_draws_noise")
def noise_drawn(target: "Target") -> None:
    """Draw once more from the random generator."""
    target.state["noise"].like(target.state["tensor_object"].data)


@on_one_rank(Expect("random_equal", r"random\.rank\d+\.cpu", -2))
def generator_seeded_again(target: "Target") -> None:
    """Reset the default generators to a seed."""
    target.state["random"].seed(99)


@fault(Expect("random_equal", r"random\.rank\d+\.cpu"), only=_SEVERAL_RANKS)
def generators_of_rank_0(target: "Target") -> None:
    """Give every rank the generators of rank 0."""
    target.state["random"].states = target.of_rank_0(target.state["random"].states)


@on_one_rank(
    _extra("scheduler.gamma", -2),
    name="scheduler_gamma",
    only=_BY_STEP,
    of="scheduler",
    key="gamma",
    value=0.5,
)
@fault(_extra("train_state.losses"), name="losses_forgotten", of="train_state", key="losses", value=[])
def attribute(target: "Target", of: str, key: str, value: Any) -> None:
    """Change an attribute of an object."""
    setattr(target.state[of], key, value)


@fault(_extra("scheduler.last_epoch"), only=SCHEDULED)
def scheduler_one_epoch_behind(target: "Target") -> None:
    """Set the scheduler back by one epoch."""
    target.state["scheduler"].last_epoch -= 1


@on_one_rank(_extra("scheduler.step_size", -2), only=_BY_STEP)
def scheduler_type(target: "Target") -> None:
    """Turn an integer of the scheduler into a float of the same value."""
    target.state["scheduler"].step_size = float(target.state["scheduler"].step_size)


@fault(_extra("scheduler.base_lrs"), only=_BY_STEP)
def scheduler_base_lr(target: "Target") -> None:
    """Double one of the scheduler's base learning rates."""
    target.state["scheduler"].base_lrs[-1] *= 2


@fault(_extra("train_state.step"))
def train_step_off_by_one(target: "Target") -> None:
    """Add one to the step counter of the training loop."""
    target.state["train_state"].step += 1


@on_one_rank(_extra("train_state.losses", -2))
def loss_next_float(target: "Target") -> None:
    """Increase one loss in the history by one unit in the last place."""
    losses = target.state["train_state"].losses
    losses[0] = math.nextafter(losses[0], math.inf)


@fault(_extra("train_state.current_loss"))
def current_loss_nan(target: "Target") -> None:
    """Set the last loss to NaN."""
    target.state["train_state"].current_loss = math.nan
