"""Closeness, where the state lies: a part against its place in the twin."""

import math

import torch

from dcpbench.records.sentences import describe
from dcpbench.verify.layout import Extent, whole
from dcpbench.verify.snapshot import Idle, Leaves, TensorLeaf
from dcpbench.verify.tolerances import compare_close

TWIN = torch.tensor([[1.0, 2.0], [3.0, 400.0]])
ROW = Extent((2, 2), (1, 0), (1, 2), 0, 2)


def twin() -> Leaves:
    return {
        "w": TensorLeaf(TWIN, whole(TWIN), None, "param"),
        "state.w.exp_avg": TensorLeaf(TWIN, whole(TWIN), None, "exp_avg"),
    }


def part(values: torch.Tensor) -> Leaves:
    return {
        "w": TensorLeaf(values, ROW, "[Shard(0)]", "param"),
        "state.w.exp_avg": TensorLeaf(TWIN[1:], ROW, "[Shard(0)]", "exp_avg"),
    }


def test_a_part_is_held_against_its_place_and_the_whole_tensor_gives_the_scale() -> None:
    assert compare_close(twin(), part(TWIN[1:].clone()), 0.0) == []
    near = TWIN[1:] + 0.03
    assert compare_close(twin(), part(near), 1e-4) == []
    (found,) = compare_close(twin(), part(near), 1e-5)
    assert (found.name, found.kind) == ("w", "param")
    assert describe(found).startswith(
        "differs from the twin by up to 0.03 (7.5e-05 of its largest magnitude)"
    )
    assert compare_close(twin(), part(TWIN[:1].clone()), 1e-4)


def test_nan_on_one_side_is_never_close() -> None:
    assert compare_close(twin(), part(torch.tensor([[3.0, math.nan]])), 1e-4)


def test_names_are_compared_both_ways() -> None:
    more = {**part(TWIN[1:]), "stranger": TensorLeaf(TWIN, whole(TWIN), None)}
    assert [found.name for found in compare_close(twin(), more, 1e-4)] == ["stranger"]
    fewer = {"w": part(TWIN[1:])["w"]}
    assert [found.name for found in compare_close(twin(), fewer, 1e-4)] == ["state.w.exp_avg"]


def test_an_optimizer_may_know_nothing_of_a_parameter_that_is_not_here() -> None:
    nothing = Extent((2, 2), (2, 0), (0, 2), 0, 0)
    absent: Leaves = {"w": TensorLeaf(torch.empty(0, 2), nothing, None, "param")}
    assert compare_close(twin(), absent, 1e-4) == []
    behind = torch.tensor(1.0)
    idle = {**absent, "state.w.step": Idle(TensorLeaf(behind, whole(behind), None))}
    counted = {**twin(), "state.w.step": TensorLeaf(behind + 3, whole(behind), None)}
    assert compare_close(counted, idle, 1e-4) == []


def test_close_is_relative_to_the_tensor_and_not_absolute() -> None:
    """Second moments of 1e-8 pass any absolute tolerance; here they must not."""

    def moment(value: float) -> Leaves:
        tensor = torch.full((4,), value)
        return {"exp_avg_sq": TensorLeaf(tensor, whole(tensor), None)}

    assert compare_close(moment(1e-8), moment(1.00001e-8), 1e-4) == []
    assert compare_close(moment(1e-8), moment(1.1e-8), 1e-4)
    assert compare_close(moment(1e-8), moment(0.0), 1e-4)
