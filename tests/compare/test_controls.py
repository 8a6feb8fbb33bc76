"""The perturbation changes everything, so that every control has a difference to report."""

import copy
import math
from collections import Counter, OrderedDict, UserDict, defaultdict
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dcpbench.compare.controls import (
    compare_controlled,
    compared_names,
    jitter,
    names_of_control,
    perturb_model,
    perturb_optimizer,
    perturbed,
    perturbed_leaves,
    perturbed_where,
)
from dcpbench.compare.leaves import bits, compare, same_value
from dcpbench.core.rank_report import Skip
from dcpbench.state.layout import Extent
from dcpbench.state.snapshot import (
    EmptyShard,
    TensorLeaf,
    persistent_tensors,
    retained,
    snapshot_model,
    snapshot_optimizer,
)
from dcpbench.workloads.models import Mlp
from support.models import Adversarial
from support.names import by_text


class Rule:
    """A hyperparameter that is an object, of a class without an equality."""

    def __init__(self, power: float) -> None:
        self.power = power

    def __call__(self, value: float) -> float:
        return value**self.power


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(Mlp([4, 8, 3]), nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.rand(6, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_every_name_is_reported_after_a_perturbation() -> None:
    model, optimizer = trained()
    before = retained(snapshot_model(model)), retained(snapshot_optimizer(model, optimizer))
    unchanged = perturb_model(model, seed=1), perturb_optimizer(optimizer, seed=1)
    assert unchanged == (set(), {("param_groups", 0, "params")})
    after = snapshot_model(model), snapshot_optimizer(model, optimizer)
    for saved, changed, names in zip(before, after, unchanged, strict=True):
        reported = {found.name for found in compare(saved, perturbed_where(saved, changed, names))}
        assert set(names_of_control(saved)) <= reported
    assert ("1.running_var",) in before[0]
    assert ("state", "0.net1.weight", "step") in before[1]
    assert "param_groups.0.params" in names_of_control(before[1])
    assert {"param_groups.0.lr", "param_groups.0.betas", "param_groups.0.amsgrad"} <= by_text(
        before[1]
    ).keys()


def test_optimizer_values_change_each_time() -> None:
    parameter = nn.Parameter(torch.ones(2))
    model, optimizer = nn.Module(), torch.optim.SGD([parameter])
    model.weight = parameter
    history = [None, torch.ones(2), {"of": 1}]
    values = {
        "step": 1,
        "on": True,
        "off": False,
        "none": None,
        "nones": [None],
        "pair": (1, False),
        "rate": 0.4375,  # what None and flags become
    }
    optimizer.state = {parameter: {**values, "inner": {"history": history}}, "all": {"steps": 3}, "one": 4}
    saved = retained(snapshot_optimizer(model, optimizer))
    of_history = {f"state.weight.inner.history.{name}" for name in ("0", "1", "2.of")}
    of_values = {f"state.weight.{name}" for name in values}
    names = {*of_history, *of_values, "state.all.steps", "state.one"}
    assert names == {name for name in by_text(saved) if name.startswith("state.")}
    for _ in range(3):
        perturb_optimizer(optimizer, seed=1)
        assert names <= {found.name for found in compare(saved, snapshot_optimizer(model, optimizer))}


@pytest.mark.parametrize(
    "value",
    [
        *(0, 0.0, -0.0, 0.5, 1, 0.9, True, False, None, "mean", "min", (0.5, 0), [1e-3]),
        *(math.inf, -math.inf, math.nan, Counter({3: 1, "5": 2}), [{"end_step": 4.0}]),
        *(torch.Size([2, 3]), torch.bfloat16, torch.float64, torch.device("cpu"), torch.device("cuda", 1)),
        *(math.sqrt, nn.ReLU, partial(math.pow, 2.0), Rule(0.5), {1, 2}, 1j),
    ],
)
def test_perturbed_value_differs_and_stays_falsy(value: object) -> None:
    changed = perturbed(value)
    assert not same_value(value, changed)
    assert not same_value(changed, perturbed(changed)), "every load meets a target that was changed again"
    if not isinstance(value, tuple | list):
        assert bool(changed) <= bool(value)
    if isinstance(value, torch.dtype | torch.device):
        assert type(changed) is type(value), "a tensor can be converted to it"
    if isinstance(value, Counter):
        assert type(changed) is Counter
        assert changed.keys() == value.keys()


@pytest.mark.parametrize("value", [0.1, 0.0, -0.0])
def test_perturbed_tensor_differs_and_stays_falsy(value: float) -> None:
    rate = torch.tensor(value)
    changed = perturbed(rate)
    assert not torch.equal(bits(rate), bits(changed))
    assert not torch.equal(bits(changed), bits(perturbed(changed)))
    assert bool(changed) == bool(rate)
    assert torch.equal(rate, torch.tensor(value)), "another tensor, and not the live one"


@pytest.mark.parametrize(
    "value",
    [
        np.arange(3),
        np.array([], dtype=np.float32),
        np.array(0.0, dtype=np.float16),
        np.array([[1.0, np.nan], [np.inf, -0.0]]),
        np.array([1 + 2j, 0]),
        np.array([True, False]),
        np.array([255, 0], dtype=np.uint8),
        np.array(["first", "second"]),
        np.array(["2026-01-01"], dtype="datetime64[D]"),
        np.array([(1, 2.0)], dtype=[("number", "i4"), ("size", "f8")]),
        np.array([None, {"a": 1}], dtype=object),
        np.int64(3),
        np.bool_(True),
        torch.arange(3),
        torch.tensor([True, False]),
        torch.tensor(7, dtype=torch.uint8),
        defaultdict(list, {"counts": np.arange(2)}),
        OrderedDict(a=[[torch.ones(2)]]),
        UserDict(a=np.arange(2)),
        (np.arange(2), "MT19937"),
    ],
    ids=repr,
)
def test_perturbed_arrays_and_containers_differ_and_keep_their_type(value: Any) -> None:
    changed = perturbed(value)
    assert not same_value(value, changed)
    assert not same_value(changed, perturbed(changed))
    assert same_value(value, copy.copy(value)), "a comparison by value, not by object"
    if isinstance(value, np.ndarray | np.generic | torch.Tensor):
        assert (type(changed), changed.dtype) == (type(value), value.dtype)
    else:
        assert type(changed) is type(value)


def test_perturbed_flags_suit_a_fused_kernel() -> None:
    assert type(perturbed(True)) is int
    assert perturbed(True) == 1, "what is on stays on: an optimizer's state depends on it"
    assert perturbed(False) is None


def test_changed_functions_do_the_same() -> None:
    assert perturbed(math.sqrt)(4.0) == 2.0
    assert isinstance(perturbed(perturbed(nn.ReLU))(), nn.ReLU)


@pytest.mark.parametrize("value", [Rule(0.5), partial(math.pow, 2.0), Counter("aab"), math.sqrt, {1, 2}])
def test_copies_have_the_same_value(value: object) -> None:
    assert same_value(value, copy.deepcopy(value))


def test_objects_are_compared_by_attributes() -> None:
    assert not same_value(Rule(0.5), Rule(0.25))
    assert not same_value(partial(math.pow, 2.0), partial(math.pow, 3.0))
    assert not same_value(math.sqrt, math.exp)
    assert not same_value(trained, test_objects_are_compared_by_attributes)
    assert not same_value(nn.ReLU, nn.Tanh)


def test_incomparable_value_is_a_skip() -> None:
    with pytest.raises(Skip, match="of type object cannot be compared with a copy of it"):
        perturbed(object())


def test_every_element_of_every_dtype_changes() -> None:
    model = Adversarial([4, 8, 3])
    for _ in range(3):
        before = {name: value.clone() for name, value in persistent_tensors(model).items()}
        perturb_model(model, seed=1)
        for name, value in persistent_tensors(model).items():
            assert (bits(value) != bits(before[name])).all(), name


def test_shared_buffers_of_one_byte_are_changed() -> None:
    model, flags = nn.Module(), torch.arange(12) % 3 > 0
    tables = [
        (flags, 2),
        (flags[2:8], 1),
        (flags.reshape(3, 4), 1),
        (torch.arange(12, dtype=torch.uint8), 16),
    ]
    for number, (table, names) in enumerate(tables):
        for name in range(names):
            model.register_buffer(f"table{number}_{name}", table)
    before = retained(snapshot_model(model))
    perturb_model(model, seed=1)
    for name, leaf in snapshot_model(model).items():
        assert bool((bits(leaf.local) != bits(before[name].local)).all()), name


def test_perturbation_is_equal_on_every_rank() -> None:
    """FSDP1 rejects ranks and parameters with different step counters."""
    model, optimizer = trained()
    before = retained(snapshot_optimizer(model, optimizer)) | retained(snapshot_model(model))
    moved = []
    for seed in (1, 1, 2):
        again, other = trained()
        perturb_model(again, seed)
        perturb_optimizer(other, seed)
        after = snapshot_optimizer(again, other) | snapshot_model(again)
        tensors = {name: leaf.local for name, leaf in after.items() if isinstance(leaf, TensorLeaf)}
        moved.append({name: local.double() - before[name].local for name, local in tensors.items()})
    for name, distance in moved[0].items():
        assert distance.min() > 15.9
        assert distance.max() < 32.1
        assert torch.equal(distance, moved[1][name])
        if not distance.ndim:
            assert distance == 16
        elif distance.numel() > 4:
            assert len(distance.round().unique()) > 2
            assert not torch.equal(distance, moved[2][name])
    moments = (moved[0]["state", "0.net1.weight", f"exp_avg{kind}"].round() for kind in ("", "_sq"))
    assert not torch.equal(*moments), "two tensors of a shape"


def test_jitter_is_equal_on_every_rank() -> None:
    torch.manual_seed(0)
    share = 2**-7
    held = [torch.randn(64, 3), torch.randn(5, dtype=torch.complex64), torch.randn(8).bfloat16()]
    kept = [torch.arange(3), torch.ones(4).to(torch.float8_e4m3fn), torch.tensor([True])]
    one, other, third = ([value.clone() for value in (*held, *kept)] for _ in range(3))
    jitter(one, share, seed=1)
    jitter(other, share, seed=1)
    jitter(third, share, seed=2)
    for value, changed, again, differently in zip(held, one, other, third, strict=False):
        assert changed.dtype == value.dtype
        factors = changed.to(torch.complex128) / value.to(torch.complex128)
        near = 2**-8 if value.dtype == torch.bfloat16 else 1e-6  # it rounds
        assert torch.allclose((factors - 1).abs(), torch.full(value.shape, share).double(), atol=near)
        assert torch.equal(changed, again)
        assert not torch.equal(changed, differently)
    signs = (one[0] / held[0] > 1).float().mean()
    assert 0.3 < float(signs) < 0.7, "some become larger, and some smaller"
    for value, changed in zip(kept, one[len(held) :], strict=True):
        assert torch.equal(value.float(), changed.float())


def test_copies_of_what_is_unchanged_differ_from_what_is_expected() -> None:
    weight = snapshot_model(trained()[0])["0.net1.weight",]
    expected = {"lost": 1, "zero": 0.0, "w": weight, "kept": 0.5, "idle": EmptyShard(0.1)}
    state = {"zero": -0.0, "w": weight, "kept": 0.25, "idle": EmptyShard(0.1), "more": 3}
    assert same_value(perturbed(state["zero"]), expected["zero"])
    changed = perturbed_where(expected, state, {"lost", "zero", "w", "idle", "more"})
    assert list(changed) == list(state), "a name that is missing would be reported whatever it holds"
    assert {name for name, leaf in changed.items() if leaf is state[name]} == {"kept", "idle", "more"}
    assert {one.name for one in compare(expected, changed)} == {"lost", "zero", "w", "kept", "more"}


def test_list_of_none_has_a_control() -> None:
    assert perturbed([None, {"steps": 4}]) == [None, {"steps": perturbed(4)}]
    functions = {"of none": [], "lr_lambdas": [None, None]}
    assert {one.name for one in compare(functions, perturbed_leaves(functions))} == functions.keys()


def test_proven_names_are_compared_without_a_control() -> None:
    expected, actual = {"lr": 0.1, "momentum": 0.9, "w": "old"}, {"lr": 0.1, "momentum": 0.8, "w": "old"}
    other = {**actual, "w": "new"}  # a control that leaves `lr` as expected
    first = compare_controlled(expected, actual, other)
    assert (first.names, first.detected) == (
        {"lr": True, "momentum": True, "w": True},
        {"lr": False, "momentum": True, "w": True},
    )
    second = compare_controlled(expected, actual, other, proven=["lr"])
    assert (second.found, second.names) == (first.found, first.names)
    assert second.found[0].name == "momentum"
    assert second.detected == dict.fromkeys(expected, True)
    third = compare_controlled(expected, actual, proven=["momentum"])
    assert [one.name for one in third.found] == ["momentum"]
    assert third.detected == dict.fromkeys(expected, True)


def test_compared_names_tell_empty_shards() -> None:
    def leaf(*extent: Any) -> TensorLeaf:
        return TensorLeaf(torch.empty(extent[-1]), Extent(*extent), None)

    leaves = {
        "lr": 0.1,
        "scalar": leaf((), (), (), 0, 1),
        "here": leaf((2, 2), (0, 0), (1, 2), 0, 2),
        "on another rank": leaf((2, 2), (2, 0), (0, 2), 0, 0),
        "nowhere": leaf((0, 2), (0, 0), (0, 2), 0, 0),
        "idle": EmptyShard(0.1),
    }
    assert compared_names(leaves) == {"lr": True, "scalar": True, "here": True, "on another rank": False}
    assert names_of_control(leaves) == ["lr", "scalar", "here"]
