"""Defects of the model's parameters and buffers after a load."""

import math
from typing import TYPE_CHECKING

from dcpbench.config.groups import Expect, Only
from dcpbench.faults.registry import fault

if TYPE_CHECKING:
    from dcpbench.faults.targets import Target

_WEIGHT = Expect("model_equal", r"net\d\.weight", -2)
_SHARDED = ["fsdp", "hsdp", "fsdp2", "hsdp2", "fsdp2_tp", "fsdp_tp"]
_BUFFERED = {"model": Only(["buffered"], "it needs buffers")}


@fault(_WEIGHT, name="weight_lowest_bit", number=0)
@fault(_WEIGHT, name="weight_exponent_bit", number=23)
@fault(_WEIGHT, name="weight_highest_bit", number=31)
def bit(target: "Target", number: int) -> None:
    """One bit of one weight on one rank: 0 is one unit in the last place, 31 the sign."""
    if target.victim:
        target.flip(target.largest_parameter(), number)


@fault(Expect("model_equal", r"net\d\.bias", -2))
def bias_lowest_bit(target: "Target") -> None:
    """One bit of one bias on one rank."""
    if target.victim:
        biases = [part for name, part in target.parameters().items() if name.endswith("bias")]
        target.flip(max(biases, key=lambda part: part.numel()), 0)


@fault(_WEIGHT)
def weight_nan(target: "Target") -> None:
    """One weight on one rank is NaN."""
    if target.victim:
        target.largest_parameter().view(-1)[0] = math.nan


@fault(_WEIGHT)
def weight_zeroed(target: "Target") -> None:
    """One tensor's part on one rank is all zeros."""
    if target.victim:
        target.largest_parameter().zero_()


@fault(_WEIGHT)
def weight_initialised_again(target: "Target") -> None:
    """One tensor's part on one rank is drawn anew."""
    if target.victim:
        target.draw_again(target.largest_parameter())


@fault(_WEIGHT)
def weight_reversed(target: "Target") -> None:
    """One tensor's elements on one rank stand in the opposite order."""
    if target.victim:
        part = target.largest_parameter()
        part.copy_(part.reshape(-1).flip(0).reshape(part.shape))


@fault(_WEIGHT)
def weight_transposed(target: "Target") -> None:
    """A square block of one weight on one rank is transposed."""
    if target.victim:
        part = target.largest_parameter()
        side = int(part.numel() ** 0.5)
        block = part.view(-1)[: side * side]
        block.copy_(block.reshape(side, side).t().reshape(-1).clone())


@fault(_WEIGHT)
def weight_rolled(target: "Target") -> None:
    """One tensor's elements on one rank are one place further on."""
    if target.victim:
        part = target.largest_parameter()
        part.copy_(part.reshape(-1).roll(1).reshape(part.shape))


@fault(_WEIGHT)
def elements_exchanged(target: "Target") -> None:
    """Two elements of one tensor on one rank have each other's place."""
    if target.victim:
        flat = target.largest_parameter().view(-1)
        flat[[0, -1]] = flat[[-1, 0]]


@fault(_WEIGHT)
def rows_exchanged(target: "Target") -> None:
    """The first and the last eight elements of one tensor on one rank have each other's place."""
    if target.victim:
        flat = target.largest_parameter().view(-1)
        target.exchange(flat[:8], flat[-8:])


@fault(Expect("model_equal", r"net\d\.\w+", -2))
def tensors_exchanged(target: "Target") -> None:
    """The two largest tensors' parts have each other's values on one rank, as far as both go."""
    if target.victim:
        largest = sorted(target.parameters().values(), key=lambda part: part.numel())[-2:]
        common = largest[0].numel()
        one, other = (part.view(-1)[:common] for part in largest)
        target.exchange(one, other)


@fault(
    Expect("model_equal", r"net\d\..*", 0),
    Expect("model_equal", r"net\d\..*", 3),
    only={"parallel": Only(_SHARDED, "elsewhere every rank has all of it")},
)
def shards_exchanged(target: "Target") -> None:
    """Two ranks have each other's parts of the parameters, one after the other, as far as both go."""
    target.exchange_with_last_rank(list(target.parameters().values()))


@fault(_WEIGHT)
def weight_of_earlier_checkpoint(target: "Target") -> None:
    """One tensor's part on one rank is that of an earlier checkpoint."""
    if target.victim:
        name, _ = max(target.parameters().items(), key=lambda item: item[1].numel())
        target.bring_back(f"model.{name}")


@fault(_WEIGHT, name="weight_through_bf16", dtype="bfloat16")
@fault(_WEIGHT, name="weight_through_fp16", dtype="float16")
def through(target: "Target", dtype: str) -> None:
    """One tensor's part on one rank went through a narrower dtype and back."""
    if target.victim:
        target.round_trip(target.largest_parameter(), dtype)


@fault(_WEIGHT)
def replica_drifted(target: "Target") -> None:
    """One replica has drifted: its weights are larger by two units in the last place or so."""
    if target.victim:
        target.largest_parameter().mul_(1 + 2**-22)


@fault(
    Expect("model_equal", r"(pretrain\.)?net\d\.weight"),
    only={"scenario": Only(["fine_tune", "fine_tune_submodules"], "it needs a frozen part")},
)
def frozen_changed(target: "Target") -> None:
    """One element of a frozen parameter, on every rank that has a part of one."""
    frozen = [part for name, part in target.parameters().items() if name.startswith("pretrain.")]
    part = max(frozen, key=lambda part: part.numel())
    if part.numel():
        target.flip(part, 0)


@fault(Expect("model_equal", "seen", -2), only=_BUFFERED)
def buffer_counts_one_more(target: "Target") -> None:
    """An integer buffer is off by one on one rank."""
    if target.victim:
        target.buffers()["seen"].add_(1)


@fault(Expect("model_equal", "gain", -2), only=_BUFFERED)
def buffer_lowest_bit(target: "Target") -> None:
    """One bit of a float buffer on one rank."""
    if target.victim:
        target.flip(target.buffers()["gain"], 0)


@fault(Expect("model_equal", "gain", 0), only=_BUFFERED)
def buffer_zeroed(target: "Target") -> None:
    """A buffer is not restored anywhere: zeros."""
    target.buffers()["gain"].zero_()
