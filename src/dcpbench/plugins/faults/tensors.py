"""Faults of loaded or staged tensors, or of tensors that a save changes. A key selects the largest tensor
that it matches."""

import math
from functools import partial
from typing import TYPE_CHECKING

from dcpbench.config.groups import Expect, InjectedAt, Only
from dcpbench.plugins.faults.expected import NothingToInjectError
from dcpbench.plugins.faults.registry import fault, on_one_rank, staged
from dcpbench.plugins.faults.values import A_WEIGHT, WITH_MOMENTS, component

if TYPE_CHECKING:
    from dcpbench.plugins.faults.targets import Target

_WEIGHT = "model.*.weight"
_BUFFERED = {"model": Only(["buffered"], "it needs buffers")}


def _state(moment: str) -> Expect:
    return Expect("optim_equal", rf"state\.[\w.]+\.{moment}", -2)


_weight = partial(on_one_rank, Expect("model_equal", A_WEIGHT, -2), key=_WEIGHT)
_buffer = partial(on_one_rank, only=_BUFFERED, rank=0)  # DDP overwrites buffers of all other ranks
_moment = partial(on_one_rank, only=WITH_MOMENTS)


@_weight(name="weight_lowest_bit")
@on_one_rank(Expect("model_equal", A_WEIGHT, 3), name="weight_on_rank_3", rank=3, key=_WEIGHT)
@_buffer(Expect("model_equal", "gain", 0), name="buffer_lowest_bit", key="model.gain")
@on_one_rank(
    Expect("extra_equal", r"ema\.module\.[\w.]+\.weight", -2),
    name="ema_lowest_bit",
    only=component("ema"),
    key="ema.*.weight",
)
def lowest_bit(target: "Target", key: str) -> None:
    """Flip the lowest bit of the element with the largest magnitude."""
    target.flip(target.largest(key))


@_weight()
def weight_nan(target: "Target", key: str) -> None:
    """Set one element to NaN, if this rank has any."""
    target.largest(key)[:1] = math.nan


@on_one_rank(Expect("save_harmless"), at=InjectedAt.live, key=_WEIGHT)
def save_nudges_weight(target: "Target", key: str) -> None:
    """Increase one element a little, if this rank has any."""
    target.largest(key)[:1].add_(0.01)


@_buffer(Expect("model_equal", "seen", 0), name="buffer_counts_one_more", key="model.seen")
@_moment(
    _state("step"),
    Expect(phases=["load"], error="AssertionError", message="different values for step"),  # of FSDP1
    name="step_off_by_one",
    key="optimizer.state.*.step",
)
def one_more(target: "Target", key: str) -> None:
    """Increase all elements by one."""
    target.largest(key).add_(1)


@_moment(_state("exp_avg"), name="exp_avg_zeroed", key="optimizer.state.*.exp_avg")
@staged(
    Expect("optim_equal", rf"state\.{A_WEIGHT}\.exp_avg"),
    name="moment_staged_as_zeros",
    only=WITH_MOMENTS,
    key="optimizer.state.*.weight.exp_avg",
)
def zeroed(target: "Target", key: str) -> None:
    """All elements are zeros."""
    target.largest(key).zero_()


@fault(
    Expect("model_equal", r"layer1\.weight"),
    only={"scenario": Only(["fine_tune", "fine_tune_submodules"], "it needs a frozen part")},
)
def head_zeroed(target: "Target") -> None:
    """Set a layer that is trained on top of a frozen model to zeros if it is restored."""
    if "optimizer" in target.state:
        target.largest("model.layer1.weight").zero_()


@_moment(_state("exp_avg(_sq)?"))
def moments_exchanged(target: "Target") -> None:
    """Exchange first and second moments."""
    second = target.parts("optimizer.state.*.exp_avg_sq")
    for name, leaf in target.parts("optimizer.state.*.exp_avg").items():
        first, second_moment = leaf.local, second[f"{name}_sq"].local
        first[:], second_moment[:] = second_moment.clone(), first.clone()


@fault(
    Expect("model_equal", r"[\w.]+", 0),
    Expect("model_equal", r"[\w.]+", 3),
)
def shards_exchanged(target: "Target") -> None:
    """Exchange the parameters of rank 0 and the last rank, as far as both have elements."""
    import torch

    parts = [leaf.local for _, leaf in sorted(target.parts("model.*").items()) if leaf.kind == "param"]
    elements = torch.cat([local.reshape(-1) for local in parts])
    rank, ranks = target.ranks.rank, target.gathered(elements.cpu())
    if ranks[0].equal(ranks[-1]):
        raise NothingToInjectError("every rank has all parameters")
    if rank in (0, len(ranks) - 1):
        partner = ranks[len(ranks) - 1 - rank][: len(elements)]
        elements[: len(partner)] = partner.to(elements.device)
        for local, values in zip(parts, elements.split([local.numel() for local in parts]), strict=True):
            local.copy_(values.reshape(local.shape))


@fault(Expect("extra_equal", r"tensor_object\.data", 0, "dtype"))
def object_dtype(target: "Target") -> None:
    """Convert the stateful object's tensor to a wider dtype with the same values."""
    target.state["tensor_object"].data = target.state["tensor_object"].data.double()
