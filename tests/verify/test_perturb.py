"""The perturbation must reach everything, or a control would have nothing to report."""

import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from dcpbench.verify.compare import bits, compare, same_value
from dcpbench.verify.layout import Extent
from dcpbench.verify.perturb import (
    all_different,
    compared_names,
    controllable,
    jitter,
    perturb_model,
    perturb_optimizer,
    perturbed,
    with_changed_constants,
    with_other_names,
)
from dcpbench.verify.snapshot import (
    Idle,
    TensorLeaf,
    digested,
    persistent_tensors,
    retained,
    snapshot_model,
    snapshot_optimizer,
)
from dcpbench.workloads.models import Mlp
from support.models import Adversarial


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
    perturb_model(model, seed=1)
    perturb_optimizer(optimizer, seed=1)
    after = snapshot_model(model), snapshot_optimizer(model, optimizer)
    for saved, changed in zip(before, after, strict=True):
        reported = {found.name for found in compare(saved, with_other_names(changed))}
        assert set(controllable(saved)) <= reported
    assert "1.running_var" in before[0]
    assert "state.0.net1.weight.step" in before[1]
    assert "param_groups.0.params" in controllable(before[1])
    assert {"param_groups.0.lr", "param_groups.0.betas", "param_groups.0.amsgrad"} <= set(before[1])


def test_hyperparameters_are_changed_wherever_they_stand() -> None:
    optimizer = torch.optim.SGD([{"of": 1, "params": [nn.Parameter(torch.ones(1))]}], lr=0.5)
    perturb_optimizer(optimizer, seed=1)
    assert (optimizer.param_groups[0]["of"], optimizer.param_groups[0]["lr"]) == (0.4375, 0.21875)


def test_what_is_retained_stays_as_it_was() -> None:
    model, optimizer = trained()
    saved = retained(snapshot_model(model)), retained(snapshot_optimizer(model, optimizer))
    model(torch.rand(6, 4)).square().sum().backward()
    optimizer.step()
    assert compare(saved[0], snapshot_model(model))
    assert compare(saved[1], snapshot_optimizer(model, optimizer))


@pytest.mark.parametrize(
    "value",
    [
        *(0, 0.0, -0.0, 0.5, 1, 0.9, True, False, None, "mean", "min", (0.5, 0), [1e-3]),
        *(math.inf, -math.inf, math.nan, Counter({3: 1, "5": 2}), [{"end_step": 4.0}]),
    ],
)
def test_a_changed_value_is_another_and_turns_nothing_on(value: object) -> None:
    changed = perturbed(value)
    assert not same_value(value, changed)
    assert not same_value(changed, perturbed(changed)), "every load meets a target that was changed again"
    if not isinstance(value, tuple | list):
        assert bool(changed) <= bool(value)
    if isinstance(value, Counter):
        assert type(changed) is Counter
        assert changed.keys() == value.keys()


@pytest.mark.parametrize("value", [0.1, 0.0, -0.0])
def test_a_changed_tensor_is_another_and_turns_nothing_on(value: float) -> None:
    rate = torch.tensor(value)
    changed = perturbed(rate)
    assert not torch.equal(bits(rate), bits(changed))
    assert not torch.equal(bits(changed), bits(perturbed(changed)))
    assert bool(changed) == bool(rate)
    assert torch.equal(rate, torch.tensor(value)), "another tensor, and not the live one"


def test_a_flag_stays_one_that_a_fused_kernel_takes() -> None:
    assert type(perturbed(True)) is int
    assert perturbed(True) == 1, "what is on stays on: an optimizer's state depends on it"
    assert perturbed(False) is None


def test_what_has_no_other_value_is_refused() -> None:
    with pytest.raises(TypeError, match="of type set has no negative control yet"):
        perturbed({1, 2})


def test_every_element_of_every_dtype_becomes_another_one_again_and_again() -> None:
    model = Adversarial([4, 8, 3])
    for _ in range(3):
        before = {name: value.clone() for name, value in persistent_tensors(model).items()}
        perturb_model(model, seed=1)
        for name, value in persistent_tensors(model).items():
            assert (bits(value) != bits(before[name])).all(), name


def test_elements_go_far_each_its_own_way_and_alike_on_every_rank_but_step_counters_together() -> None:
    """FSDP1 refuses steps of ranks and parameters that are not the same."""
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
    moments = (moved[0][f"state.0.net1.weight.exp_avg{kind}"].round() for kind in ("", "_sq"))
    assert not torch.equal(*moments), "two tensors of a shape"


def test_a_jitter_changes_each_element_by_its_share_and_the_same_everywhere() -> None:
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


def test_what_an_unrestored_state_has_as_expected_becomes_another_and_nothing_else() -> None:
    expected = {"first": 1, "kept": 0.5, "w": snapshot_model(trained()[0])["0.net1.weight"], "last": "mean"}
    unrestored = {**expected, "kept": 0.25, "more": 3}
    changed = with_changed_constants(expected, unrestored, unrestored)
    assert list(changed) == list(unrestored), "a name that is missing would be reported whatever it holds"
    assert {name for name, leaf in changed.items() if leaf is unrestored[name]} == {"kept", "more"}
    found = {one.name for one in compare(expected, changed)}
    assert found == {*expected, "more"}
    named = with_changed_constants(expected, unrestored, ["first", "kept"])
    assert {name for name, leaf in named.items() if leaf is not unrestored[name]} == {"first"}


def test_of_functions_a_list_of_none_stays_and_has_a_control_all_the_same() -> None:
    assert perturbed([None, {"steps": 4}]) == [None, {"steps": perturbed(4)}]
    functions = {"of none": [], "lr_lambdas": [None, None]}
    assert {one.name for one in compare(functions, all_different(functions))} == functions.keys()


def test_names_of_parameters_alone_become_others() -> None:
    one, other = "param_groups.0.params", "param_groups.1.params"
    leaves = {one: ["w", "b"], "param_groups.0.lr": 0.1, "params": 1, other: ["c"]}
    changed = with_other_names(leaves)
    assert list(changed) == list(leaves)
    assert [found.name for found in compare(leaves, changed)] == [one, other]


def test_every_leaf_becomes_another_one() -> None:
    leaf = snapshot_model(trained()[0])["0.net1.weight"]
    leaves = {"first": 0.1, "w": leaf, **digested({"large": leaf}), "idle": Idle(leaf), "last": "mean"}
    changed = all_different(leaves)
    assert list(changed) == list(leaves)
    assert [found.name for found in compare(leaves, changed)] == ["first", "w", "large", "last"]
    assert changed["idle"] is leaves["idle"], "an entry that may be absent has nothing to report"


def test_what_there_is_to_compare_and_whether_it_is_here() -> None:
    def leaf(*extent: Any) -> TensorLeaf:
        return TensorLeaf(torch.empty(extent[-1]), Extent(*extent), None)

    leaves = {
        "lr": 0.1,
        "scalar": leaf((), (), (), 0, 1),
        "here": leaf((2, 2), (0, 0), (1, 2), 0, 2),
        "on another rank": leaf((2, 2), (2, 0), (0, 2), 0, 0),
        "nowhere": leaf((0, 2), (0, 0), (0, 2), 0, 0),
        "idle": Idle(0.1),
    }
    assert compared_names(leaves) == {"lr": True, "scalar": True, "here": True, "on another rank": False}
    assert controllable(leaves) == ["lr", "scalar", "here"]
