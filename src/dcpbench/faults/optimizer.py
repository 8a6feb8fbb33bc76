"""Defects of the optimizer's state and hyperparameters after a load."""

import math
from typing import TYPE_CHECKING, Any

from dcpbench.config.groups import Expect, Only
from dcpbench.faults.registry import fault

if TYPE_CHECKING:
    from dcpbench.faults.targets import Target

WITH_MOMENTS = {"optimizer": Only(["adam", "adamw", "adamw_groups"], "it needs two moments")}
_WITH_GROUPS = {"optimizer": Only(["adamw_groups"], "it needs two groups")}


def _moment(entry: str, rank: int = -2, problem: str | None = None) -> Expect:
    return Expect("optim_equal", rf"state\.net\d\.\w+\.{entry}", rank, problem)


def _group(key: str, rank: int | None = 0, number: int = 0, problem: str | None = None) -> Expect:
    return Expect("optim_equal", rf"param_groups\.{number}\.{key}", rank, problem)


# FSDP1 refuses what its ranks do not agree on, or lack, when it is asked for its state once more.
_STEPS_DISAGREE = Expect(phases=["load"], error="AssertionError", message="different values for step")
_NOT_ALL_THERE = Expect(phases=["load"], error="AssertionError", message="Manually calculated")


@fault(_moment("exp_avg"), name="exp_avg_lowest_bit", only=WITH_MOMENTS, entry="exp_avg", number=0)
@fault(_moment("exp_avg"), name="exp_avg_highest_bit", only=WITH_MOMENTS, entry="exp_avg", number=31)
@fault(_moment("exp_avg_sq"), name="exp_avg_sq_lowest_bit", only=WITH_MOMENTS, entry="exp_avg_sq", number=0)
def moment_bit(target: "Target", entry: str, number: int) -> None:
    """One bit of one element of a moment on one rank."""
    if target.victim:
        target.flip(target.largest_moment(entry), number)


@fault(_moment("exp_avg"), name="exp_avg_zeroed", only=WITH_MOMENTS, entry="exp_avg")
@fault(_moment("exp_avg_sq"), name="exp_avg_sq_zeroed", only=WITH_MOMENTS, entry="exp_avg_sq")
def moment_zeroed(target: "Target", entry: str) -> None:
    """One parameter's moment is all zeros on one rank."""
    if target.victim:
        target.largest_moment(entry).zero_()


@fault(_moment("exp_avg"), name="exp_avg_through_bf16", only=WITH_MOMENTS, entry="exp_avg")
@fault(_moment("exp_avg_sq"), name="exp_avg_sq_through_bf16", only=WITH_MOMENTS, entry="exp_avg_sq")
def moment_through_bf16(target: "Target", entry: str) -> None:
    """One parameter's moment went through a narrower dtype and back on one rank."""
    if target.victim:
        target.round_trip(target.largest_moment(entry), "bfloat16")


@fault(_moment("exp_avg(_sq)?"), only=WITH_MOMENTS)
def moments_exchanged(target: "Target") -> None:
    """First and second moments have each other's values on one rank."""
    if target.victim:
        first, second = target.moments("exp_avg"), target.moments("exp_avg_sq")
        for name, part in first.items():
            target.exchange(part, second[name])


@fault(_moment("exp_avg"), only=WITH_MOMENTS)
def exp_avg_of_earlier_checkpoint(target: "Target") -> None:
    """One parameter's first moment is that of an earlier checkpoint on one rank."""
    if target.victim:
        name, _ = max(target.moments("exp_avg").items(), key=lambda item: item[1].numel())
        target.bring_back(f"optimizer.state.{name}.exp_avg")


@fault(_moment("exp_avg"), only=WITH_MOMENTS)
def exp_avg_of_other_parameter(target: "Target") -> None:
    """One parameter's first moment is that of another one, as far as it goes, on one rank."""
    if target.victim:
        parts = sorted(target.moments("exp_avg").values(), key=lambda part: part.numel())
        one, other = parts[-1].view(-1), parts[0].reshape(-1)
        one[: other.numel()] = other


@fault(_moment("step"), _STEPS_DISAGREE, only=WITH_MOMENTS)
def step_off_by_one(target: "Target") -> None:
    """One parameter's step counter on one rank."""
    if target.victim:
        next(iter(target.moments("step").values())).add_(1)


@fault(_moment("step", rank=0), only=WITH_MOMENTS)
def steps_zeroed(target: "Target") -> None:
    """Every step counter starts over."""
    for step in target.moments("step").values():
        step.zero_()


@fault(_moment(r"\w+", problem="missing"), _STEPS_DISAGREE, _NOT_ALL_THERE, only=WITH_MOMENTS)
def state_dropped(target: "Target") -> None:
    """One parameter has no state on one rank."""
    if target.victim:
        state = target.state["optimizer"].optimizer.state
        del state[max(state, key=lambda parameter: parameter.numel())]


@fault(_group("amsgrad"), name="amsgrad_not_restored", only=WITH_MOMENTS, key="amsgrad", value=None)
@fault(_group("betas"), name="betas_not_restored", only=WITH_MOMENTS, key="betas", value=[0.8, 0.88])
@fault(_group("eps"), name="eps_not_restored", only=WITH_MOMENTS, key="eps", value=1e-06)
@fault(_group("initial_lr"), name="initial_lr_not_restored", key="initial_lr", value=1.0)
@fault(_group("weight_decay"), name="weight_decay_not_restored", key="weight_decay", value=0.5)
@fault(_group("lr", number=1), name="lr_of_second_group", only=_WITH_GROUPS, key="lr", value=0.3, group=1)
@fault(
    _group("weight_decay", number=1),
    name="weight_decay_of_second_group",
    only=_WITH_GROUPS,
    key="weight_decay",
    value=0.01,
    group=1,
)
def hyperparameter(target: "Target", key: str, value: Any, group: int = 0) -> None:
    """One hyperparameter of one group is another one, on every rank."""
    target.param_groups[group][key] = tuple(value) if hasattr(value, "__iter__") else value


@fault(_group("lr", rank=-2))
def lr_next_float(target: "Target") -> None:
    """The learning rate of the first group is the next larger float on one rank."""
    if target.victim:
        group = target.param_groups[0]
        group["lr"] = math.nextafter(group["lr"], math.inf)


@fault(_group("lr"))
def lr_not_restored(target: "Target") -> None:
    """The learning rate of the first group was not restored."""
    target.param_groups[0]["lr"] *= 2


@fault(
    _group("initial_lr", rank=-2, problem="missing"),
    Expect(phases=["load"], error="KeyError", message="initial_lr"),
)
def group_key_dropped(target: "Target") -> None:
    """A group has lost its `initial_lr` on one rank."""
    if target.victim:
        del target.param_groups[0]["initial_lr"]


@fault(
    _group("momentum", rank=None),
    Expect(phases=["load"], error="RuntimeError", message=r"param_groups\.0\.momentum"),
    only=WITH_MOMENTS,
)
def group_key_added(target: "Target") -> None:
    """A group has a key that was never saved, on one rank."""
    if target.victim:
        target.param_groups[0]["momentum"] = 0.9


@fault(_group(r"\w+"), only=_WITH_GROUPS)
def groups_exchanged(target: "Target") -> None:
    """The two groups have each other's hyperparameters."""
    one, other = target.param_groups[:2]
    for key in one.keys() - {"params"}:
        one[key], other[key] = other[key], one[key]
