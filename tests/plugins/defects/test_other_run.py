"""The state of another run, as what a defect makes of it: equal in every name, or close in a rank's part."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from dcpbench.cell import explained, steps
from dcpbench.cell.cell import Cell
from dcpbench.cell.explained import Resumed
from dcpbench.core.defects import Defect
from dcpbench.plugins.defects import _other_run
from dcpbench.plugins.defects._other_run import far_tensors
from dcpbench.verify.compare import ABSENT
from dcpbench.verify.layout import Extent, whole
from dcpbench.verify.losses import TOLERANCES, loss_tolerance
from dcpbench.verify.snapshot import Idle, Leaves, TensorLeaf
from dcpbench.workloads.build_run import build
from dcpbench.workloads.run_state import live_state
from dcpbench.workloads.training_run import TrainingRun
from dcpbench.workloads.workload import batches_of
from support.alone import alone, config, world

ONCE: dict[str, Any] = {"model": "short", "train_steps": 1, "resume_steps": 1, "saves": 1}
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


@pytest.mark.parametrize(("draws", "sizes"), [(True, {"tp": 1}), (True, {}), (False, {"tp": 1})])
def test_defect_of_a_drawing_run_has_wider_bounds(
    draws: bool, sizes: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run whose weights are off by a few per cent of the largest, and its losses by less, is accepted there
    only."""
    told: dict[str, Any] = {}
    train = steps.train

    def expected(cell: Cell, moment: str, reference: Resumed) -> Iterator[Any]:
        with torch.no_grad():
            for value in reference.restored.model.parameters():
                value.mul_(1.003)
        reference.restored.train(reference.data, reference.until)
        state = _other_run.as_resumed(cell, reference, live_state(reference.restored))
        told.update({**state, "losses": state[reference.rule.check]})
        yield state

    def resume(cell: Cell, run: TrainingRun, *rest: Any) -> list[float]:
        losses_of = train(cell, run, *rest)
        if cell.measured("load_s"):
            run.draws, run.sizes = draws, sizes
        return losses_of

    monkeypatch.setattr(explained, "_defects", lambda: {"mine": Defect(("resumed",), bool, expected)})
    monkeypatch.setattr(steps, "train", resume)
    alone("weight_lowest_bit", **ONCE)
    apart = draws and bool(sizes)
    assert ("loss of step 2" in told["losses"]) is apart
    assert ("net1.weight" in told["model_equal"]) is apart
    assert ("state.net1.weight.exp_avg" in told["optim_equal"]) is apart
    assert "train_state.losses" in told["extra_equal"], "they are those that were recorded"


@pytest.mark.parametrize("component", ["none", "grad_scaler"])
def test_equal_states_are_equal_in_every_name(component: str) -> None:
    given = config(**ONCE, component=component)
    run = build(given, world(), 0)
    run.train(batches_of(given, world().device), 1)
    state = live_state(run)
    names = _other_run.same_state(run.train_state.losses, state, state, 1e-4)
    assert names >= {name for part in ("model_equal", "extra_equal") for name in state[part]}
    gone = {**state, "optim_equal": dict.fromkeys(("state.net1.weight.step", "state.gone.step"), ABSENT)}
    names = _other_run.same_state(run.train_state.losses, state, gone, 1e-4)
    assert {name for name in names if name.startswith("state.")} == {"state.gone.step"}
