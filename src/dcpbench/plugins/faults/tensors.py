"""Faults of loaded or staged tensors, or of tensors that a save changes. A key selects the largest tensor
that it matches."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from dcpbench.config.groups import Expect, Only
from dcpbench.plugins.faults.registry import Inject, fault, live, on_one_rank, staged
from dcpbench.plugins.faults.values import A_BIAS, A_WEIGHT, WITH_MOMENTS, component

if TYPE_CHECKING:
    from dcpbench.plugins.faults.targets import Target

_WEIGHT, _GAIN, _OBJECT = "model.*.weight", "model.gain", "tensor_object.data"
_EXP_AVG, _EXP_AVG_SQ, _STEP = (f"optimizer.state.*.{entry}" for entry in ("exp_avg", "exp_avg_sq", "step"))
_DATA = r"tensor_object\.data"
_BUFFERED = {"model": Only(["buffered"], "it needs buffers")}
_FINE_TUNED = {"scenario": Only(["fine_tune", "fine_tune_submodules"], "it needs a frozen part")}
_SHARDED = """
    fsdp hsdp fsdp2 hsdp2 fsdp2_tp fsdp_tp fsdp_flat fsdp_no_mesh fsdp2_per_layer fsdp2_no_reshard
    fsdp2_reshard_2 fsdp2_cpu_offload fsdp2_mixed
    """.split()  # noqa: SIM905

# FSDP1 refuses to return its state if ranks disagree on it or lack some of it.
_STEPS_DISAGREE = Expect(phases=["load"], error="AssertionError", message="different values for step")
_NOT_ALL_THERE = Expect(phases=["load"], error="AssertionError", message="Manually calculated")


def _entry(entry: str, rank: int = -2, problem: str | None = None) -> Expect:
    return Expect("optim_equal", rf"state\.[\w.]+\.{entry}", rank, problem)


_weight = partial(on_one_rank, Expect("model_equal", A_WEIGHT, -2), key=_WEIGHT)
_moment = partial(on_one_rank, only=WITH_MOMENTS)
_exp_avg = partial(_moment, _entry("exp_avg"), key=_EXP_AVG)
_exp_avg_sq = partial(_moment, _entry("exp_avg_sq"), key=_EXP_AVG_SQ)
_buffer = partial(on_one_rank, only=_BUFFERED, rank=0)  # DDP overwrites buffers of all other ranks


def _object(name: str, part: str, **options: Any) -> Callable[[Inject], Inject]:
    """Declare a fault of a part of the stateful object that no other check detects."""
    expect = Expect("extra_equal", rf"tensor_object\.{part}", -2)
    return on_one_rank(expect, name=name, key=f"tensor_object.{part}", **options)


def _on_rank(rank: int, check: str, name_of: str, **options: Any) -> Callable[[Inject], Inject]:
    return on_one_rank(Expect(check, name_of, rank), rank=rank, **options)


@_weight(name="weight_lowest_bit", number=0)
@_on_rank(0, "model_equal", A_WEIGHT, name="weight_on_rank_0", key=_WEIGHT, number=0)
@_on_rank(3, "model_equal", A_WEIGHT, name="weight_on_rank_3", key=_WEIGHT, number=0)
@_weight(name="weight_exponent_bit", number=23)
@_weight(name="weight_highest_bit", number=31)
@on_one_rank(Expect("model_equal", A_BIAS, -2), name="bias_lowest_bit", key="model.*.bias", number=0)
@_buffer(Expect("model_equal", "gain", 0), name="buffer_lowest_bit", key=_GAIN, number=0)
@_exp_avg(name="exp_avg_lowest_bit", number=0)
@_exp_avg(name="exp_avg_highest_bit", number=31)
@_exp_avg_sq(name="exp_avg_sq_lowest_bit", number=0)
@_on_rank(
    1,
    "optim_equal",
    rf"state\.{A_WEIGHT}\.exp_avg",
    name="exp_avg_on_rank_1",
    only=WITH_MOMENTS,
    key="optimizer.state.*.weight.exp_avg",
    number=0,
)
@on_one_rank(Expect("extra_equal", _DATA, -2), name="object_lowest_bit", key=_OBJECT, number=0)
@on_one_rank(
    Expect("extra_equal", r"ema\.module\.[\w.]+\.weight", -2),
    name="ema_lowest_bit",
    only=component("ema"),
    key="ema.*.weight",
    number=0,
)
def bit(target: "Target", key: str, number: int) -> None:
    """Flip one bit of the element with the largest magnitude: 0 is one unit in the last place, 31 the
    sign."""
    target.flip(target.largest(key), number)


@fault(Expect("model_equal", r"pretrain\.[\w.]+\.weight|(net|layer)\d\.weight"), only=_FINE_TUNED)
def frozen_changed(target: "Target") -> None:
    """Flip one bit of a frozen parameter, on every rank that has a part of one."""
    part = target.largest("model.pretrain.*")
    if part.numel():
        target.flip(part, 0)


@fault(Expect("model_equal", r"layer1\.weight"), only=_FINE_TUNED)
def head_zeroed(target: "Target") -> None:
    """Set a layer that is trained on top of a frozen model to zeros if it is restored."""
    if "optimizer" in target.state:
        target.largest("model.layer1.weight").zero_()


@_weight(name="weight_nan")
@_object("nan_canonicalised", "nans")
def nan(target: "Target", key: str) -> None:
    """Set one element to NaN, if this rank has any."""
    target.largest(key)[:1] = math.nan


@live(name="save_nudges_weight", on_one_rank=True, key=_WEIGHT, by=0.01)
@staged(Expect("model_equal", A_WEIGHT), name="weight_changed_while_staged", key=_WEIGHT, by=0.001)
def nudged(target: "Target", key: str, by: float) -> None:
    """Increase one element a little, if this rank has any."""
    part = target.largest(key)[:1]
    target.put(part, part + by)


@_buffer(Expect("model_equal", "seen", 0), name="buffer_counts_one_more", key="model.seen")
@_moment(_entry("step"), _STEPS_DISAGREE, name="step_off_by_one", key=_STEP)
@staged(Expect("extra_equal", _DATA), name="object_staged_changed", key=_OBJECT)
def one_more(target: "Target", key: str) -> None:
    """Increase all elements by one."""
    target.largest(key).add_(1)


@_weight(name="weight_zeroed")
@_object("denormals_flushed", "denormals")
@_exp_avg(name="exp_avg_zeroed")
@_exp_avg_sq(name="exp_avg_sq_zeroed")
@fault(Expect("model_equal", "gain", 0), name="buffer_zeroed", only=_BUFFERED, key=_GAIN)
@fault(Expect("extra_equal", _DATA, 0), name="object_zeroed", key=_OBJECT)
@staged(
    Expect("optim_equal", rf"state\.{A_WEIGHT}\.exp_avg"),
    name="moment_staged_as_zeros",
    only=WITH_MOMENTS,
    key="optimizer.state.*.weight.exp_avg",
)
def zeroed(target: "Target", key: str) -> None:
    """All elements are zeros."""
    target.largest(key).zero_()


@fault(_entry("step", rank=0), name="steps_zeroed", only=WITH_MOMENTS, factor=0, by=0)
@live(name="save_takes_step", factor=1, by=1)
def steps(target: "Target", factor: int, by: int) -> None:
    """Reset every step counter, or increase it by one."""
    for step in target.parts(_STEP).values():
        step.local.mul_(factor).add_(by)


@_weight()
def weight_initialised_again(target: "Target", key: str) -> None:
    """Fill a tensor with different random values."""
    target.draw_again(target.largest(key))


@_weight()
def weight_transposed(target: "Target", key: str) -> None:
    """Transpose a square block of the elements."""
    flat = target.largest(key)
    side = int(flat.numel() ** 0.5)
    block = flat[: side * side].view(side, side)
    block.copy_(block.t().clone())


@_weight(name="elements_exchanged", count=1)
@_weight(name="rows_exchanged", count=8)
def ends_exchanged(target: "Target", key: str, count: int) -> None:
    """Exchange the first and the last elements."""
    flat = target.largest(key)
    flat[:count], flat[-count:] = flat[-count:].clone(), flat[:count].clone()


@on_one_rank(Expect("model_equal", r"[\w.]+", -2))
def tensors_exchanged(target: "Target") -> None:
    """Exchange the values of the parts of the two largest parameters, as far as both have any."""
    one, *rest = (leaf.local.view(-1) for leaf in target.parameters().values())
    other = target.one_of(part for part in rest if part.data_ptr() != one.data_ptr())
    common = one[: other.numel()]
    common[:], other[:] = other.clone(), common.clone()


@_moment(_entry("exp_avg(_sq)?"))
def moments_exchanged(target: "Target") -> None:
    """Exchange first and second moments."""
    second = target.parts(_EXP_AVG_SQ)
    for name, leaf in target.parts(_EXP_AVG).items():
        one, other = leaf.local, second[f"{name}_sq"].local
        one[:], other[:] = other.clone(), one.clone()


@_exp_avg()
def exp_avg_of_other_parameter(target: "Target", key: str) -> None:
    """Overwrite the first moment of one parameter by that of another, as far as that goes."""
    parts = [leaf.local.view(-1) for leaf in target.parts(key).values()]
    parts[0][: parts[-1].numel()] = parts[-1]


@_moment(_entry(r"\w+", problem="missing"), _STEPS_DISAGREE, _NOT_ALL_THERE)
def state_dropped(target: "Target") -> None:
    """Remove the optimizer state of one parameter."""
    state = target.state["optimizer"].optimizer.state
    del state[max(state, key=lambda parameter: parameter.numel())]


@fault(
    Expect("model_equal", r"[\w.]+", 0),
    Expect("model_equal", r"[\w.]+", 3),
    only={"parallel": Only(_SHARDED, "under other layouts every rank has all parameters")},
)
def shards_exchanged(target: "Target") -> None:
    """Exchange the parts of the parameters of two ranks, one after the other, as far as both have any."""
    target.exchange_with_last_rank([leaf.local for _, leaf in sorted(target.parameters().items())])


@_weight(name="weight_of_earlier_checkpoint", saves=2)
@_exp_avg(name="exp_avg_of_earlier_checkpoint", saves=2)
@_object("object_of_earlier_checkpoint", "data", saves=2)
def of_earlier_checkpoint(target: "Target", key: str) -> None:
    """Overwrite the part of one tensor by that of the cell's first checkpoint."""
    name, leaf = next(iter(target.parts(key).items()))
    full = target.checkpointer.read_tensor(str(target.first), name)
    assert full is not None
    leaf.local.copy_(leaf.extent.take(full).reshape(leaf.local.shape))


@_weight(name="weight_reversed", method="flip", arguments=[0])
@_weight(name="weight_rolled", method="roll", arguments=[1])
@_weight(name="weight_through_bf16", method="bfloat16")
@_weight(name="weight_through_fp16", method="half")
@_object("integers_through_float64", "integers", method="double")
@_object("zeros_unsigned", "zeros", method="abs")
@_object("flags_inverted", "flags", method="logical_not")
@_object("complex_conjugated", "complex", method="conj_physical")
@_exp_avg(name="exp_avg_through_bf16", method="bfloat16")
@_exp_avg_sq(name="exp_avg_sq_through_bf16", method="bfloat16")
def converted(target: "Target", key: str, method: str, arguments: Sequence[int] = ()) -> None:
    """Overwrite the elements by the result of a tensor method, which reorders them or converts them to
    another dtype and back."""
    part = target.largest(key)
    target.put(part, getattr(part, method)(*arguments))


@_weight()
def replica_drifted(target: "Target", key: str) -> None:
    """Let one replica drift: increase its weights by about two units in the last place."""
    part = target.largest(key)
    target.put(part, part * (1 + 2**-22))


@fault(Expect("extra_equal", _DATA, 0, "dtype"))
def object_dtype(target: "Target") -> None:
    """Convert the stateful object's tensor to a wider dtype with the same values."""
    target.state["tensor_object"].data = target.state["tensor_object"].data.double()


@fault(
    Expect("extra_equal", _DATA, 0, "shape"),
    Expect(phases=["load"], error="ValueError", message="Size mismatch .*tensor_object"),
)
def object_shape(target: "Target") -> None:
    """Reshape the stateful object's tensor."""
    target.state["tensor_object"].data = target.state["tensor_object"].data.reshape(-1)
