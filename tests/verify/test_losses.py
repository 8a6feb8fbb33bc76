"""Tensors that are close, by the part that a rank has, and losses."""

import math

import pytest
import torch
from torch import nn

from dcpbench.core.mismatch import Problem
from dcpbench.plugins.defects._other_run import far_tensors
from dcpbench.verify.layout import Extent, whole
from dcpbench.verify.losses import TOLERANCES, compare_losses, loss_tolerance
from dcpbench.verify.snapshot import Idle, Leaves, TensorLeaf

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


def test_part_is_compared_at_the_full_tensors_scale() -> None:
    assert far_tensors(twin(), part(TWIN[1:].clone()), 0.0) == []
    near = TWIN[1:] + 0.03
    assert far_tensors(twin(), part(near), 1e-4) == []
    assert far_tensors(twin(), part(near), 7.6e-5) == []
    assert far_tensors(twin(), part(near), 7.4e-5) == ["w"]
    assert far_tensors(twin(), part(TWIN[:1].clone()), 1e-4)


def test_missing_tensor_is_far() -> None:
    fewer = {"w": part(TWIN[1:])["w"]}
    assert far_tensors(twin(), fewer, 1e-4) == ["state.w.exp_avg"]


def test_entries_of_absent_parameters_are_ignored() -> None:
    nothing = Extent((2, 2), (2, 0), (0, 2), 0, 0)
    absent: Leaves = {"w": TensorLeaf(torch.empty(0, 2), nothing, None, "param")}
    assert far_tensors(twin(), absent, 1e-4) == []
    behind = torch.tensor(1.0)
    idle = {**absent, "state.w.step": Idle(TensorLeaf(behind, whole(behind), None))}
    counted = {**twin(), "state.w.step": TensorLeaf(behind + 3, whole(behind), None)}
    assert far_tensors(counted, idle, 1e-4) == []


def test_tolerance_is_relative_to_the_tensor() -> None:
    """Any absolute tolerance would accept second moments of 1e-8."""

    def moment(value: float) -> Leaves:
        tensor = torch.full((4,), value)
        return {"exp_avg_sq": TensorLeaf(tensor, whole(tensor), None)}

    assert far_tensors(moment(1e-8), moment(1.00001e-8), 1e-4) == []
    assert far_tensors(moment(1e-8), moment(1.1e-8), 1e-4)
    assert far_tensors(moment(1e-8), moment(0.0), 1e-4)


def of(tensor: torch.Tensor, kind: str = "param", name: str = "w") -> Leaves:
    return {name: TensorLeaf(tensor, whole(tensor), None, kind)}


def test_coarse_dtype_has_a_larger_tolerance() -> None:
    fine = torch.tensor([1.0, 1.03])
    assert far_tensors(of(torch.ones(2)), of(fine), 1e-4)
    coarse = torch.ones(2, dtype=torch.bfloat16)
    assert far_tensors(of(coarse), of(fine.bfloat16()), 1e-4) == []
    assert far_tensors(of(coarse), of(torch.tensor([1.0, 1.1]).bfloat16()), 1e-4)
    # A float32 moment of a bfloat16 model consists of its roundings; an optimizer's scalars do not.
    moment = of(torch.ones(2), "exp_avg", "state.w.exp_avg")
    assert far_tensors(of(coarse) | moment, of(coarse) | of(fine, "exp_avg", "state.w.exp_avg"), 1e-4) == []
    step = of(torch.tensor(50.0), "step", "state.w.step")
    behind = of(torch.tensor(49.0), "step", "state.w.step")
    assert far_tensors(of(coarse) | step, of(coarse) | behind, 1e-4)


def test_loss_of_a_coarse_model_rounds_less() -> None:
    assert loss_tolerance(1e-4, [torch.float32]) == 1e-4
    assert loss_tolerance(1e-6, [torch.float32]) == 1e-6
    assert 5e-4 < loss_tolerance(1e-4, [torch.float32, torch.bfloat16]) < 1e-3


@pytest.mark.parametrize("coarse", ["a", "c"])
def test_coarsest_parameter_sets_the_tolerance(coarse: str) -> None:
    names = ["a", "b", "c"]
    dtypes = {name: torch.bfloat16 if name == coarse else torch.float32 for name in names}
    model = nn.ParameterDict({name: nn.Parameter(torch.ones(2, dtype=dtypes[name])) for name in names})
    assert loss_tolerance(1e-4, dtypes.values()) > 5e-4
    twin = {name: TensorLeaf(model[name].detach(), whole(model[name]), None, "param") for name in names}
    near = {**twin, **of(torch.tensor([1.0, 1.03]), name="b")}
    assert far_tensors(twin, near, 1e-4) == []


def test_tolerances_are_the_documented_ones() -> None:
    """One in a million, and one in ten thousand."""
    for name, largest in (("strict", 1e-6), ("standard", 1e-4)):
        one, tolerance = of(torch.ones(2, dtype=torch.float64)), TOLERANCES[name]
        near, far = (torch.ones(2, dtype=torch.float64) + largest * times for times in (0.9, 1.5))
        assert far_tensors(one, of(near), tolerance) == []
        assert far_tensors(one, of(far), tolerance)


def test_magnitude_of_complex_tensors_uses_both_parts() -> None:
    twin, near = torch.tensor([1 + 1000j]), torch.tensor([1 + 1000.05j])
    assert far_tensors(of(twin), of(near), 1e-4) == []
    assert far_tensors(of(twin), of(near), 5.1e-5) == []
    assert far_tensors(of(twin), of(near), 4.9e-5) == ["w"]


def test_other_shapes_and_other_types_are_far() -> None:
    wider = of(torch.ones(2, 3)) | {"state.w.exp_avg": "mean"}
    assert far_tensors(twin(), wider, 1e-4) == ["w", "state.w.exp_avg"]


@pytest.mark.parametrize("value", [2.0, math.nan])
def test_other_elements_and_nan_are_far(value: float) -> None:
    assert far_tensors(of(torch.ones(2)), of(torch.tensor([1.0, value])), 1e-4) == ["w"]


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("one", "other", "close", "equal"),
    [
        (1.0, 1.0, True, True),
        (1.0, 1.0 + 1e-5, True, False),
        (-1.0, -1.0 - 1e-5, True, False),
        (1.0, 1.001, False, False),
        (1e-8, 1.1e-8, False, False),
        (0.0, -0.0, True, False),
        (0.0, 1e-9, False, False),
        (NAN, NAN, True, True),
        (NAN, 1.0, False, False),
        (1.0, NAN, False, False),
        (INF, INF, True, True),
        (1.0, None, False, False),
        (None, 1.0, False, False),
        (None, NAN, False, False),
    ],
)
def test_losses_are_compared_step_by_step(
    one: float | None, other: float | None, close: bool, equal: bool
) -> None:
    """None is the loss of a step that a run did not take."""
    expected, actual = ([1.0] if loss is None else [1.0, loss] for loss in (one, other))
    distance = None if one is None or other is None else abs(one - other)
    for found, as_expected, problem in (
        (compare_losses(expected, actual, 7, 1e-4), close, Problem.far),
        (compare_losses(expected, actual, 7), equal, Problem.value),
    ):
        if as_expected:
            assert found == []
            continue
        (finding,) = found
        assert finding.name == "loss of step 8"
        assert finding.max_abs_diff == pytest.approx(distance, nan_ok=True)
        assert {repr(one), repr(other)} <= set(finding.facts.values())
        if other is not None and math.isnan(other):
            assert finding.problem is Problem.nan
            assert "share" not in finding.facts
            continue
        assert finding.problem is problem
        assert ("share" in finding.facts) is (distance is not None)
        if one and distance:
            assert finding.facts["share"] == pytest.approx(distance / abs(one), nan_ok=True)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.tensor([True, False]), torch.tensor([True, True])),
        (torch.tensor([2**62 + 1]), torch.tensor([2**62])),
        (torch.tensor([1 + 1j]), torch.tensor([1 + 2j])),
        (torch.tensor([-math.inf, 1.0]), torch.tensor([0.0, 1.0])),
        (torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn), torch.tensor([1.0, 1.5]).to(torch.float8_e4m3fn)),
    ],
)
def test_every_dtype_is_compared(one: torch.Tensor, other: torch.Tensor) -> None:
    assert far_tensors(of(one), of(one.clone()), 1e-4) == []
    assert far_tensors(of(one), of(other), 1e-4)
